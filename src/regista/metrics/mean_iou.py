"""Mean IoU of classes: summed over a set, or image by image."""

from __future__ import annotations

from typing import Any

import numpy as np

from regista.metrics.contingency import label_map


class MeanIoU:
    """Mean IoU over classes, pixels summed over the whole set, as the segmentation benchmarks have it.

    A class that is neither in a target nor predicted anywhere does not count; one that is predicted but in no
    target scores 0.

    Args:
        num_classes: Ids are 0 to ``num_classes - 1``.
        ignore_index: Target id whose pixels do not count; may lie outside these.

    Attributes:
        confusion: (C, C) int64, targets by predictions.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is at least 1, got {num_classes}")
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.confusion = np.zeros((num_classes, num_classes), dtype=np.int64)

    def update(self, pred: Any, target: Any) -> None:
        """Count an image.

        Args:
            pred, target: Integer maps (H, W).

        Raises:
            ValueError: for maps that do not fit, or ids that are no class.
        """
        self.confusion += confusion(pred, target, self.num_classes, self.ignore_index)

    def per_class(self) -> np.ndarray:
        """IoU of each class, (C,), NaN for one that does not count."""
        return class_iou(self.confusion)

    def compute(self) -> float:
        """The mean over classes, in [0, 1].

        Raises:
            ValueError: if no pixel has been counted.
        """
        self._check()
        return float(np.nanmean(self.per_class()))

    def pixel_accuracy(self) -> float:
        """Share of counted pixels with the right class.

        Raises:
            ValueError: if no pixel has been counted.
        """
        self._check()
        return float(np.trace(self.confusion) / self.confusion.sum())

    def _check(self) -> None:
        if not self.confusion.any():
            raise ValueError("no pixel has been counted: every target was ignored, or there was none")


class MeanImageIoU:
    """Mean over images of the mean IoU over the classes of that image.

    A class counts in an image if it is in its target or predicted there. Arguments: as ``MeanIoU``.

    Attributes:
        values: One mean IoU an image.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes is at least 1, got {num_classes}")
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.values: list[float] = []

    def update(self, pred: Any, target: Any) -> None:
        """Score an image; see ``MeanIoU.update``.

        Raises:
            ValueError: also if every pixel of it is ignored.
        """
        counts = confusion(pred, target, self.num_classes, self.ignore_index)
        if not counts.any():
            raise ValueError(f"no pixel counts: the target is ignore_index={self.ignore_index} everywhere")
        self.values.append(float(np.nanmean(class_iou(counts))))

    def compute(self) -> float:
        """The mean over images, in [0, 1].

        Raises:
            ValueError: without an image.
        """
        if not self.values:
            raise ValueError("no image has been scored")
        return float(np.mean(self.values))


def confusion(pred: Any, target: Any, num_classes: int, ignore_index: int | None = None) -> np.ndarray:
    """Counts of target class by predicted class of one image: (C, C) int64.

    Raises:
        ValueError: for maps that do not fit, or ids that are no class.
    """
    found, wanted = label_map(pred, "pred"), label_map(target, "target")
    if found.shape != wanted.shape:
        raise ValueError(f"pred and target are maps of one image, got {found.shape} and {wanted.shape}")
    if ignore_index is not None:
        counted = wanted != ignore_index
        found, wanted = found[counted], wanted[counted]
    for name, ids in (("pred", found), ("target", wanted)):
        wrong = np.unique(ids[(ids < 0) | (ids >= num_classes)])
        if wrong.size:
            raise ValueError(
                f"{name} has ids {wrong[:5].tolist()}, classes are 0 to {num_classes - 1}"
                + ("" if name == "pred" else f" and ignore_index is {ignore_index}")
            )
    cells = np.bincount(wanted.reshape(-1) * num_classes + found.reshape(-1), minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def class_iou(counts: np.ndarray) -> np.ndarray:
    """(C, C) -> (C,), NaN where a class is in neither."""
    shared = np.diagonal(counts).astype(np.float64)
    union = counts.sum(0) + counts.sum(1) - np.diagonal(counts)
    iou: np.ndarray = np.divide(shared, union, out=np.full(len(counts), np.nan), where=union > 0)
    return iou
