"""Attention sinks: patch tokens that attention pours into, apart from their norms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regista.diagnosis.outliers import high_tokens, log_ratio

LEAST_RATIO = 5.0


class Sinks(NamedTuple):
    """Which patch tokens are sinks in one block.

    Attributes:
        mask: (n, rows, cols) bool.
        share: Of all valid patch tokens.
        mass: Share of all attention that goes into them, mean over images.
        strongest: Median attention received by a sink over that of the other patches; 1 without sinks.
    """

    mask: Tensor
    share: float
    mass: float
    strongest: float


def find_sinks(received: Tensor, valid: Tensor | None = None, comparisons: int = 1) -> Sinks:
    """Patches that receive at least five times the attention of the median patch, as a second mode of single tokens.

    Args:
        received: (n, rows, cols), the mean attention probability each patch receives; its sum
            over all tokens of an image is 1.
        valid: (n, rows, cols) bool, False for padded cells.
        comparisons: How many blocks are looked at; as in ``find_outliers``.

    Raises:
        ValueError: for another shape, or NaN and infinite values.
    """
    if received.ndim != 3 or not torch.isfinite(received).all():
        raise ValueError(f"received attention is a finite (n, rows, cols) tensor, got {tuple(received.shape)}")
    values = received.detach().cpu().double().numpy()
    usable = np.ones(values.shape, bool) if valid is None else valid.cpu().numpy().astype(bool)
    nothing = Sinks(torch.zeros(values.shape, dtype=torch.bool), 0.0, 0.0, 1.0)
    if not usable.any():
        return nothing
    relative = log_ratio(values, usable)
    mask, threshold, _ = high_tokens(relative, usable, LEAST_RATIO, comparisons)
    if threshold is None:
        return nothing
    mass = float((values * mask).sum() / len(values))
    strongest = float(np.exp(np.median(relative[mask]) - np.median(relative[usable & ~mask])))
    return Sinks(torch.from_numpy(mask), float(mask.sum() / usable.sum()), mass, strongest)
