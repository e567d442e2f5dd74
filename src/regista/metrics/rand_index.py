"""Adjusted Rand index of the label maps of one image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regista.metrics.contingency import Contingency, count_overlaps


def adjusted_rand_index(pred: Any, target: Any, ignore_index: int | Sequence[int] | None = None) -> float:
    """Agreement of two partitions above chance (Hubert and Arabie 1985): 1 equal, 0 by chance, may be below 0.

    All counted pixels, background too. With the background in ``ignore_index`` it is the FG-ARI of object-centric
    learning; that says nothing on images of a single object, where the target is one region.

    Args:
        pred, target: Integer maps (H, W); every id, 0 too, is a region.
        ignore_index: Ids of ``target`` that do not count.

    Raises:
        ValueError: for maps that do not fit, or no counted pixel.
    """
    return adjusted_rand(count_overlaps(pred, target, ignore_index))


def adjusted_rand(table: Contingency) -> float:
    """``adjusted_rand_index`` of counted overlaps, by pairs of pixels in whole numbers; 1 for equal partitions."""
    total = int(table.counts.sum())
    both = _squares(table.counts)
    rows, columns = _squares(table.counts.sum(1)), _squares(table.counts.sum(0))
    together = both - total
    target_only, pred_only = rows - both, columns - both
    apart = total**2 - rows - columns + both
    if target_only == 0 and pred_only == 0:
        return 1.0
    above = 2 * (together * apart - target_only * pred_only)
    below = (together + target_only) * (target_only + apart) + (together + pred_only) * (pred_only + apart)
    return above / below


def _squares(counts: np.ndarray) -> int:
    return int((counts.astype(np.int64) ** 2).sum())
