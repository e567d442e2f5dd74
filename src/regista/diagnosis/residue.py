"""Positional residue: what the features say about the place, whatever the image shows."""

from __future__ import annotations

import torch
from torch import Tensor


class PositionalResidue:
    """Share of the patch features' variance that the per-position mean over images explains.

    Streams over batches. With n images a mean of pure noise would explain 1 / n by chance;
    the estimate is corrected for that (one-way analysis of variance, omega squared without
    its small-sample term), so noise gives about 0 and features fixed by position give 1.

    Args:
        num_patches: P.
        embed_dim: D.
    """

    def __init__(self, num_patches: int, embed_dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(num_patches, embed_dim, dtype=torch.float64)
        self._within = 0.0

    def update(self, patches: Tensor) -> None:
        """Add final patch features (B, P, D)."""
        for image in patches.detach().double().cpu():
            self.count += 1
            step = image - self._mean
            self._mean += step / self.count
            self._within += float((step * (image - self._mean)).sum())  # Welford

    def share(self) -> float | None:
        """0 to 1, or None with fewer than two images (or constant features)."""
        positions = len(self._mean)
        if self.count < 2 or positions < 2:
            return None
        error = self._within / (positions * (self.count - 1))  # variance within a position, all channels
        centred = self._mean - self._mean.mean(0)
        between = float((centred**2).sum()) / (positions - 1) - error / self.count
        total = max(0.0, between) + error
        return max(0.0, between) / total if total > 0 else None
