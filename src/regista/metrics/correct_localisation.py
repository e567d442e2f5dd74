"""CorLoc: in how many images the one predicted box hits an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def corloc(pred: Sequence[Any], target: Sequence[Any], *, threshold: float = 0.5) -> float:
    """Share of images whose box has an IoU of at least ``threshold`` with one of the objects' boxes, in [0, 1].

    Args:
        pred: One box (xmin, ymin, xmax, ymax) an image, max exclusive; None is a miss.
        target: The boxes of each image, (n, 4), at least one.

    Raises:
        ValueError: for lists of other lengths, no image, or an image without an object.
    """
    if len(pred) != len(target) or not len(pred):
        raise ValueError(f"wanted a box and a list of boxes an image, got {len(pred)} and {len(target)}")
    hits = []
    for index, (box, objects) in enumerate(zip(pred, target, strict=True)):
        if not len(objects):
            raise ValueError(f"image {index} has no object; leave such images out")
        hits.append(box is not None and bool((box_iou(np.asarray([box]), np.asarray(objects)) >= threshold).any()))
    return float(np.mean(hits))


def box_iou(first: Any, second: Any) -> np.ndarray:
    """IoU of every pair: (n, 4), (m, 4) as (xmin, ymin, xmax, ymax), max exclusive -> (n, m) float64.

    Raises:
        ValueError: for other shapes, or boxes that end before they begin.
    """
    a, b = (_boxes(boxes) for boxes in (first, second))
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.prod((high - low).clip(min=0), axis=-1)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=-1) for boxes in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    iou: np.ndarray = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return iou


def _boxes(values: Any) -> np.ndarray:
    boxes = np.asarray(values, dtype=np.float64)
    if boxes.ndim != 2 or boxes.shape[-1] != 4:
        raise ValueError(f"boxes are (n, 4) as (xmin, ymin, xmax, ymax), got shape {boxes.shape}")
    if not (np.isfinite(boxes).all() and (boxes[:, 2:] >= boxes[:, :2]).all()):
        raise ValueError("a box ends before it begins, or is not finite; wanted (xmin, ymin, xmax, ymax)")
    return boxes
