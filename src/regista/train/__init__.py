"""Training that knows no method: a loop on accelerate, schedules, checkpoints that resume exactly."""

from __future__ import annotations
