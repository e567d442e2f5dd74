"""Numbers of tasks, each against a definition that is written beside it."""

from __future__ import annotations

from regista.metrics.correct_localisation import box_iou, corloc
from regista.metrics.depth import depth_metrics
from regista.metrics.mean_iou import MeanImageIoU, MeanIoU
from regista.metrics.rand_index import adjusted_rand_index
from regista.metrics.region_overlap import many_to_one_miou, mean_best_overlap, one_to_one_miou

__all__ = [
    "MeanImageIoU",
    "MeanIoU",
    "adjusted_rand_index",
    "box_iou",
    "corloc",
    "depth_metrics",
    "many_to_one_miou",
    "mean_best_overlap",
    "one_to_one_miou",
]
