"""How well predicted regions of one image cover its target regions: three rules, one table of overlaps.

All are per image, as in the evaluation of RATS (2606.14701); average them over images. A method with more
segments scores higher by the first and the last rule whatever it does: report a control with as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from regista.metrics.contingency import Contingency, count_overlaps

Ignored = int | Sequence[int] | None


def many_to_one_miou(
    pred: Any, target: Any, ignore_index: Ignored = None, *, assign: Literal["overlap", "iou"] = "overlap"
) -> float:
    """Every predicted region goes to one target region; those of one target are merged; mean IoU, in [0, 1].

    Target regions that nobody goes to score 0.

    Args:
        pred, target: Integer maps (H, W); every id, 0 too, is a region.
        ignore_index: Ids of ``target`` that do not count.
        assign: To the target of the largest "overlap" in pixels, or of the highest "iou"; ties to the lowest id.

    Raises:
        ValueError: for maps that do not fit, no counted pixel, or another rule.
    """
    if assign not in ("overlap", "iou"):
        raise ValueError(f"assign is 'overlap' or 'iou', got {assign!r}")
    return many_to_one(count_overlaps(pred, target, ignore_index), assign)


def one_to_one_miou(pred: Any, target: Any, ignore_index: Ignored = None) -> float:
    """The best one-to-one matching of regions (Hungarian, on IoU); mean IoU over target regions, in [0, 1].

    Target regions without a partner score 0. Arguments and errors: as ``many_to_one_miou``.
    """
    return one_to_one(count_overlaps(pred, target, ignore_index))


def mean_best_overlap(pred: Any, target: Any, ignore_index: Ignored = None) -> float:
    """Mean over target regions of the IoU with their best predicted region, in [0, 1].

    Arguments and errors: as ``many_to_one_miou``. Never below ``one_to_one_miou``.
    """
    return best_overlap(count_overlaps(pred, target, ignore_index))


def many_to_one(table: Contingency, assign: Literal["overlap", "iou"] = "overlap") -> float:
    """``many_to_one_miou`` of counted overlaps."""
    owners = (table.counts if assign == "overlap" else table.iou()).argmax(0)  # (P,)
    owned = np.zeros((table.counts.shape[1], table.counts.shape[0]), dtype=np.int64)
    owned[np.arange(len(owners)), owners] = 1
    merged = table.counts @ owned  # (G, G): pixels of a target in the union of another's regions
    shared = np.diagonal(merged)
    union = table.counts.sum(1) + merged.sum(0) - shared
    return float(np.mean(shared / union))


def one_to_one(table: Contingency) -> float:
    """``one_to_one_miou`` of counted overlaps."""
    iou = table.iou()
    rows, columns = linear_sum_assignment(iou, maximize=True)
    return float(iou[rows, columns].sum() / len(table.target_ids))


def best_overlap(table: Contingency) -> float:
    """``mean_best_overlap`` of counted overlaps."""
    return float(table.iou().max(1).mean())
