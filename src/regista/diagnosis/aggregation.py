"""Lazy aggregation: does the image vector look at the object, or at what surrounds it.

"Vision Transformers Need More Than Registers" (2602.22394), section 2: the patch score is the
cosine of a patch to the global vector (equation 3), and Point-in-Box is the share of images
whose best patch lies on an annotated object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor


class HitRatio(NamedTuple):
    """How often the best patch lies on an object, and how often a random one would.

    Attributes:
        ratio: Hits over images with an object.
        chance: Mean share of cells on an object.
        deviation: Standard deviation of a random picker's ratio.
        images: Images with an object.
    """

    ratio: float
    chance: float
    deviation: float
    images: int


def boxes_to_cells(boxes: np.ndarray, grid_size: tuple[int, int], patch_size: int) -> np.ndarray:
    """Cells whose centre lies in a box: (k, 4) pixels (xmin, ymin, xmax, ymax), max exclusive -> bool (rows, cols)."""
    y = (np.arange(grid_size[0]) + 0.5) * patch_size
    x = (np.arange(grid_size[1]) + 0.5) * patch_size
    inside = np.zeros(grid_size, bool)
    for xmin, ymin, xmax, ymax in np.asarray(boxes, dtype=float).reshape(-1, 4):
        inside |= ((y >= ymin) & (y < ymax))[:, None] & ((x >= xmin) & (x < xmax))[None]
    return inside


def mask_to_cells(mask: np.ndarray, patch_size: int) -> np.ndarray:
    """Cells more than half of whose pixels are foreground: bool (H, W) -> bool (rows, cols)."""
    rows, cols = mask.shape[0] // patch_size, mask.shape[1] // patch_size
    cells = np.asarray(mask, dtype=float)[: rows * patch_size, : cols * patch_size]
    share: np.ndarray = cells.reshape(rows, patch_size, cols, patch_size).mean((1, 3))
    return share > 0.5


def hit_ratio(scores: Tensor, foreground: Mapping[int, np.ndarray]) -> HitRatio | None:
    """Point-in-Box over the images that have an object.

    Args:
        scores: (n, rows, cols), the patch scores.
        foreground: {image: bool (rows, cols)}; images without a foreground cell are left out.

    Returns:
        None if no image has one.
    """
    hits, shares = [], []
    for image, cells in foreground.items():
        if not cells.any():
            continue
        best = int(scores[image].flatten().argmax())
        hits.append(bool(cells.reshape(-1)[best]))
        shares.append(float(cells.mean()))
    if not hits:
        return None
    chance = np.array(shares)
    deviation = float(np.sqrt((chance * (1 - chance)).sum()) / len(chance))
    return HitRatio(float(np.mean(hits)), float(chance.mean()), deviation, len(hits))
