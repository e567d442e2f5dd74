"""What is trained for: a task each."""

from __future__ import annotations
