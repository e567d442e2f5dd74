"""SINDER's detection and repair target (2407.16826), used at inference without its training."""

from __future__ import annotations

from regista.methods.sinder.directions import model_directions as model_directions

__all__ = ["model_directions"]
