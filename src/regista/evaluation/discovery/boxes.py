"""From cells of the patch grid to boxes and masks."""

from __future__ import annotations

import numpy as np
from scipy import ndimage
from torch import Tensor

Box = tuple[int, int, int, int]


def box_of(mask: np.ndarray, patch_size: int, image_size: tuple[int, int] | None = None) -> Box:
    """The box around the cells of a mask, in pixels: (xmin, ymin, xmax, ymax), max exclusive.

    Args:
        mask: bool (rows, cols).
        image_size: (height, width) at which it ends.

    Raises:
        ValueError: if no cell is set.
    """
    rows, cols = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    if not len(rows):
        raise ValueError("the mask has no cell")
    box = [patch_size * int(value) for value in (cols[0], rows[0], cols[-1] + 1, rows[-1] + 1)]
    if image_size is not None:
        height, width = image_size
        box = [min(value, end) for value, end in zip(box, (width, height, width, height), strict=True)]
    xmin, ymin, xmax, ymax = box
    return xmin, ymin, xmax, ymax


def coarse_mask(scores: Tensor) -> np.ndarray:
    """Cells whose score is above the mean plus one standard deviation, the largest piece: (rows, cols) -> bool.

    Pieces are 4-connected; of equally large ones the first. Where all scores are equal, the first highest cell.

    Raises:
        ValueError: for another shape, or NaN.
    """
    values = scores.detach().float().cpu().numpy()
    if values.ndim != 2 or not np.isfinite(values).all():
        raise ValueError(f"scores are finite numbers (rows, cols), got shape {values.shape}")
    mask = values > values.mean() + values.std()
    if not mask.any():
        mask = np.zeros_like(mask)
        mask[np.unravel_index(values.argmax(), values.shape)] = True
    pieces, count = ndimage.label(mask)
    sizes = np.bincount(pieces.reshape(-1), minlength=count + 1)[1:]
    largest: np.ndarray = pieces == 1 + sizes.argmax()
    return largest
