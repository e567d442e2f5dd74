"""LOST: the box of one object out of the patch features of one image (Simeoni et al., BMVC 2021, 2109.14279)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from regista.evaluation.discovery.boxes import Box, box_of

CHUNK = 512  # rows of the similarity matrix that exist at a time


def lost(
    features: Tensor,
    grid_size: tuple[int, int],
    patch_size: int,
    *,
    k: int = 100,
    bias: float = 0.0,
    image_size: tuple[int, int] | None = None,
) -> Box:
    """The object's box: the seed is the patch that is like the fewest others, the object what is like it.

    Two patches are alike where the product of their features plus ``bias`` is positive. Of patches alike to
    equally many the first is taken. Where the seed is not even like itself (a negative bias) the box is its cell.

    Args:
        features: (P, D), keys of the last block in the paper; not normalised there.
        grid_size: (rows, cols), P = rows * cols.
        patch_size: In pixels.
        k: Among so many patches of lowest degree others are looked for that are like the seed.
        bias: Added to every product. 0 in LOST; *Vision Transformers Need Registers* adds one that it does not
            publish.
        image_size: (height, width) without padding, at which the box ends.

    Returns:
        (xmin, ymin, xmax, ymax) in pixels, max exclusive.

    Raises:
        ValueError: for features that do not fit the grid, NaN, or k below 1.
    """
    mask = lost_mask(features, grid_size, k=k, bias=bias)
    return box_of(mask, patch_size, image_size)


def lost_mask(features: Tensor, grid_size: tuple[int, int], *, k: int = 100, bias: float = 0.0) -> np.ndarray:
    """The patches of the object: bool (rows, cols), in one piece. Arguments and errors: as ``lost``."""
    rows, cols = grid_size
    if features.ndim != 2 or len(features) != rows * cols:
        raise ValueError(f"features are (P, D) with P = {rows} x {cols}, got {tuple(features.shape)}")
    if k < 1:
        raise ValueError(f"k is at least 1, got {k}")
    flat = features.detach().float()
    if not torch.isfinite(flat).all():
        raise ValueError("features have NaN or infinite values")
    degree = torch.cat(list(_degrees(flat, bias)))  # (P,)
    order = torch.argsort(degree, stable=True)
    seed = int(order.narrow(0, 0, 1))
    near = order.narrow(0, 0, min(k, len(order)))
    alike = near[flat[near] @ flat[seed] + bias > 0]
    weight = flat[alike].sum(0)  # (D,)
    mask = (flat @ weight + len(alike) * bias > 0).cpu().numpy().reshape(rows, cols)  # (rows, cols)
    pieces, _ = ndimage.label(mask)
    place = divmod(seed, cols)
    if not mask[place]:
        alone = np.zeros_like(mask)
        alone[place] = True
        return alone
    piece: np.ndarray = pieces == pieces[place]
    return piece


def _degrees(flat: Tensor, bias: float) -> Iterator[Tensor]:
    """To how many other patches each is alike, piece by piece: (P, D) -> int64 (chunk,)."""
    for start in range(0, len(flat), CHUNK):
        rows = flat.narrow(0, start, min(CHUNK, len(flat) - start))
        alike = rows @ flat.T > -bias
        itself = (rows.square().sum(-1) > -bias).long()
        yield alike.sum(-1) - itself
