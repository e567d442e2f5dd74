"""How the regions of two label maps of one image overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_TABLE = 2**22  # entries between the lowest and the highest id for which counting beats sorting


@dataclass(frozen=True)
class Contingency:
    """Counts of pixels that two maps share.

    Attributes:
        counts: (G, P) int64, target regions by predicted regions; only regions that are there.
        target_ids, pred_ids: (G,), (P,) ascending.
    """

    counts: np.ndarray
    target_ids: np.ndarray
    pred_ids: np.ndarray

    def iou(self) -> np.ndarray:
        """Intersection over union of every target and predicted region, (G, P) float64."""
        union = self.counts.sum(1, keepdims=True) + self.counts.sum(0, keepdims=True) - self.counts
        iou: np.ndarray = self.counts / union
        return iou


def count_overlaps(pred: Any, target: Any, ignore_index: int | Sequence[int] | None = None) -> Contingency:
    """Count the pixels of every pair of regions, by one bincount.

    Args:
        pred, target: Integer maps (H, W) of one image; every id, 0 too, is a region.
        ignore_index: Pixels with this id (or one of these) in ``target`` do not count.

    Raises:
        ValueError: for maps of other shapes or types, or if no pixel counts.
    """
    found, wanted = label_map(pred, "pred"), label_map(target, "target")
    if found.shape != wanted.shape:
        raise ValueError(f"pred and target are maps of one image, got {found.shape} and {wanted.shape}")
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    if ignore_index is not None:
        counted = ~np.isin(wanted, np.atleast_1d(np.asarray(ignore_index)))
        found, wanted = found[counted], wanted[counted]
    if not found.size:
        raise ValueError(f"no pixel counts: the target is ignore_index={ignore_index} everywhere")
    pred_ids, columns = _compact(found)
    target_ids, rows = _compact(wanted)
    cells = rows * len(pred_ids) + columns
    counts = np.bincount(cells, minlength=len(target_ids) * len(pred_ids))
    return Contingency(counts.reshape(len(target_ids), len(pred_ids)), target_ids, pred_ids)


def label_map(values: Any, name: str) -> np.ndarray:
    """A map (H, W) of int64 out of an array or tensor of integers or bools.

    Raises:
        ValueError: for another shape, floats, or no pixel.
    """
    array = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} is an integer map (H, W) of one image, got shape {array.shape}")
    if array.dtype.kind not in "iub":
        raise ValueError(f"{name} holds ids, which are integers, got {array.dtype}")
    return array.astype(np.int64)


def _compact(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids that are there, ascending; their numbers for every pixel)."""
    low, high = int(ids.min()), int(ids.max())
    if high - low >= LARGEST_TABLE:
        there, numbers = np.unique(ids, return_inverse=True)
        return there, numbers.reshape(-1)
    shifted = ids - low
    present = np.bincount(shifted, minlength=high - low + 1) > 0
    places = np.cumsum(present) - 1
    return np.flatnonzero(present) + low, places[shifted]
