"""PCA pictures that can be compared: one fit for all images, fixed signs, percentile scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 2048  # patches that are in float64 at a time


@dataclass(frozen=True)
class PatchColours:
    """From patch features to colours: a basis and the range that is stretched over [0, 1].

    Attributes:
        mean: (D,) float64.
        basis: (C, D) float64, signs fixed.
        low, high: (C,) scores that become 0 and 1.
    """

    mean: np.ndarray
    basis: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def maps(self, patches: Tensor, grid_size: tuple[int, int], *, num_components: int = 3) -> Tensor:
        """(n, P, D) -> (n, rows, cols, num_components) in [0, 1]; components beyond the basis are 0."""
        scores = _scores(patches.flatten(0, -2), self.mean, self.basis)
        scaled = ((scores - self.low) / np.maximum(self.high - self.low, 1e-12)).clip(0, 1)
        padded = np.zeros((len(scaled), num_components))
        padded.T[: len(self.basis)] = scaled.T
        return torch.from_numpy(padded).float().reshape(len(patches), *grid_size, num_components)  # (n, rows, cols, 3)


def fit_colours(patches: Tensor, *, num_components: int = 3) -> PatchColours:
    """The first principal components of patch features, ready to colour these or others.

    The 1st to 99th percentile of each component is stretched over [0, 1], and signs are such that
    each component's skew is positive (so that the picture does not flip between runs).

    Args:
        patches: (..., D), all patches to fit on.
    """
    flat = patches.flatten(0, -2)  # (n * P, D)
    components = min(num_components, *flat.shape)
    mean = np.sum([chunk.sum(0) for chunk in _chunks(flat)], axis=0) / len(flat)
    scatter = np.sum([(chunk - mean).T @ (chunk - mean) for chunk in _chunks(flat)], axis=0)  # (D, D)
    basis = np.linalg.eigh(scatter)[1].T[::-1][:components]  # largest variance first
    scores = _scores(flat, mean, basis)
    signs = np.where((scores**3).sum(0) < 0, -1.0, 1.0)
    low, high = np.percentile(scores * signs, [1, 99], axis=0)
    return PatchColours(mean, basis * signs.reshape(-1, 1), low, high)


def _chunks(flat: Tensor) -> Iterator[np.ndarray]:
    """Float64 pieces of (n, D)."""
    return (piece.detach().cpu().double().numpy() for piece in torch.split(flat, CHUNK))


def _scores(flat: Tensor, mean: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """(n, D) -> (n, C) float64."""
    return np.concatenate([(chunk - mean) @ basis.T for chunk in _chunks(flat)])


def pca_maps(patches: Tensor, grid_size: tuple[int, int], *, num_components: int = 3) -> Tensor:
    """The first principal components of patch features as colours.

    Args:
        patches: (n, P, D).
        grid_size: (rows, cols), P = rows * cols.

    Returns:
        (n, rows, cols, num_components) in [0, 1], one basis for all images; see ``fit_colours``.
    """
    return fit_colours(patches, num_components=num_components).maps(patches, grid_size, num_components=num_components)
