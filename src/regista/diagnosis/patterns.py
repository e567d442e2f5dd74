"""Are high values single tokens, or a pattern of the whole field."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

STEP = 1.4
LINE = 0.6
SHORTEST = 4
SOLID = 4
REGION = 0.2
REGION_RATIO = 3.0
MOSTLY = 0.5
TOUCHING = np.array([np.zeros((3, 3)), np.ones((3, 3)), np.zeros((3, 3))])  # eight neighbours, within an image


def why_pattern(relative: np.ndarray, mask: np.ndarray, usable: np.ndarray) -> str:
    """Why a group of high values is a pattern of the field and not of single tokens, or "".

    Args:
        relative: (n, rows, cols), log(value / median).
        mask: bool, the high ones.
        usable: bool, cells that count.

    Returns:
        A reason if most flagged cells rise less than 1.4 times over their unflagged
        neighbours, fill rows or columns, belong to a line from border to border (slanted ones
        too), or lie in large regions: a fifth of the image, or a solid square of four by four
        that is not even three times the median, as objects differ from their background.
    """
    some = mask.any((1, 2))
    relative, mask, usable = relative[some], mask[some], usable[some]
    if _median_step(relative, mask, usable) < STEP:
        return "the high norms rise gradually from their neighbours"
    most = MOSTLY * mask.sum()
    if _in_lines(mask, usable).sum() > most:
        return "the high norms fill whole rows or columns"
    labels, count = ndimage.label(mask, TOUCHING)
    sizes = np.bincount(labels.reshape(-1), minlength=count + 1)
    if _of(labels, _crossing(labels), count).sum() > most:
        return "the high norms form lines across the image"
    inside = _of(labels, np.flatnonzero(sizes > REGION * mask[0].size), count)
    if np.median(relative[mask]) < np.log(REGION_RATIO) and sizes[sizes >= SOLID**2].sum() - sizes.item(0) > most:
        inside |= ndimage.binary_opening(mask, np.ones((1, SOLID, SOLID)))
    return "the high norms are large regions" if inside.sum() > most else ""


def _median_step(relative: np.ndarray, mask: np.ndarray, usable: np.ndarray) -> float:
    """Median over flagged cells of value / mean of the unflagged ones among the eight neighbours."""
    plain = usable & ~mask
    height = np.exp(relative)
    total, count = _around(np.where(plain, height, 0.0)), _around(plain.astype(float))
    seen = mask & (count > 0.5)
    return float(np.median(height[seen] * count[seen] / total[seen])) if seen.any() else float("inf")


def _around(values: np.ndarray) -> np.ndarray:
    """Sum over the three by three cells about each, within an image."""
    for axis in (1, 2):
        total = np.moveaxis(values.copy(), axis, 0)
        lines = np.moveaxis(values, axis, 0)
        total[1:] += lines[:-1]
        total[:-1] += lines[1:]
        values = np.moveaxis(total, 0, axis)
    return values


def _in_lines(mask: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Flagged cells in rows or columns of which most are flagged."""
    inside = np.zeros_like(mask)
    for axis in (1, 2):
        filled = mask.sum(axis, keepdims=True)
        inside |= mask & (filled >= LINE * usable.sum(axis, keepdims=True)) & (filled >= SHORTEST)
    return inside


def _crossing(labels: np.ndarray) -> np.ndarray:
    """Labels of components that reach from one border of the image to the opposite one."""
    found = [np.zeros(0, labels.dtype)]
    for axis in (1, 2):
        if labels.shape[axis] >= SHORTEST:
            first, last = np.take(labels, 0, axis), np.take(labels, labels.shape[axis] - 1, axis)
            found.append(np.intersect1d(first, last))
    return np.concatenate(found)


def _of(labels: np.ndarray, wanted: np.ndarray, count: int) -> np.ndarray:
    """Cells of the wanted components; label 0 is no component."""
    chosen = np.zeros(count + 1, bool)
    chosen[wanted] = True
    chosen[0] = False
    cells: np.ndarray = chosen[labels]
    return cells
