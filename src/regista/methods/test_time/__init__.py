"""Test-time registers (2506.08010): a cure without training."""

from __future__ import annotations

from regista.methods.test_time.neurons import find_register_neurons as find_register_neurons

__all__ = ["find_register_neurons"]
