"""Tests of regista.report."""

from __future__ import annotations
