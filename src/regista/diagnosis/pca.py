"""PCA pictures that can be compared: one fit for all images, fixed signs, percentile scaling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor


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
        flat = patches.detach().cpu().double().flatten(0, 1).numpy()  # (n * P, D)
        scores = (flat - self.mean) @ self.basis.T
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
    flat = patches.detach().cpu().double().flatten(0, -2).numpy()  # (n * P, D)
    components = min(num_components, *flat.shape)
    fitted = PCA(components, svd_solver="covariance_eigh").fit(flat)
    scores = (flat - fitted.mean_) @ fitted.components_.T
    signs = np.where((scores**3).sum(0) < 0, -1.0, 1.0)
    low, high = np.percentile(scores * signs, [1, 99], axis=0)
    return PatchColours(fitted.mean_, fitted.components_ * signs.reshape(-1, 1), low, high)


def pca_maps(patches: Tensor, grid_size: tuple[int, int], *, num_components: int = 3) -> Tensor:
    """The first principal components of patch features as colours.

    Args:
        patches: (n, P, D).
        grid_size: (rows, cols), P = rows * cols.

    Returns:
        (n, rows, cols, num_components) in [0, 1], one basis for all images; see ``fit_colours``.
    """
    return fit_colours(patches, num_components=num_components).maps(patches, grid_size, num_components=num_components)
