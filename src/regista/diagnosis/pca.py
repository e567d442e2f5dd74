"""PCA pictures that can be compared: one fit for all images, fixed signs, percentile scaling."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor


def pca_maps(patches: Tensor, grid_size: tuple[int, int], *, num_components: int = 3) -> Tensor:
    """The first principal components of patch features as colours.

    Args:
        patches: (n, P, D).
        grid_size: (rows, cols), P = rows * cols.

    Returns:
        (n, rows, cols, num_components) in [0, 1]: one basis for all images, the 1st to 99th
        percentile of each component stretched over [0, 1], and signs such that each
        component's skew is positive (so that the picture does not flip between runs).
    """
    count = patches.shape[0]
    flat = patches.detach().cpu().double().flatten(0, 1).numpy()  # (n * P, D)
    components = min(num_components, *flat.shape)
    scores = PCA(components, svd_solver="covariance_eigh").fit_transform(flat)
    scores = scores * np.where((scores**3).sum(0) < 0, -1.0, 1.0)
    low, high = np.percentile(scores, [1, 99], axis=0)
    scaled = ((scores - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    padded = np.zeros((len(scaled), num_components))
    padded.T[:components] = scaled.T
    return torch.from_numpy(padded).float().reshape(count, *grid_size, num_components)  # (n, rows, cols, 3)
