"""Mean IoU against loops over pixels, and against torchmetrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassJaccardIndex

from regista.metrics import MeanImageIoU, MeanIoU

CLASSES = 5


def images(count: int = 6, seed: int = 0, ignored: int | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        size = tuple(rng.integers(1, 9, 2))
        target = rng.integers(0, CLASSES - 1, size)  # the last class is in no target
        if ignored is not None:
            target = np.where(rng.random(size) < 0.3, ignored, target)
            target[0, 0] = 0
        found.append((rng.integers(0, CLASSES, size), target))
    return found


def slow(pairs: list[tuple[np.ndarray, np.ndarray]], ignored: int | None) -> tuple[list[float | None], float]:
    values: list[float | None] = []
    right = total = 0
    for label in range(CLASSES):
        shared = union = 0
        for pred, target in pairs:
            for place in np.ndindex(target.shape):
                if target[place] == ignored:
                    continue
                total += label == 0
                right += label == 0 and pred[place] == target[place]
                shared += pred[place] == label and target[place] == label
                union += pred[place] == label or target[place] == label
        values.append(shared / union if union else None)
    return values, right / total


@pytest.mark.parametrize("ignored", [None, 255, 2])
def test_summed_over_the_set(ignored: int | None) -> None:
    pairs = images(ignored=ignored)
    metric = MeanIoU(CLASSES, ignored)
    for pred, target in pairs:
        metric.update(torch.from_numpy(pred), target)
    wanted, accuracy = slow(pairs, ignored)
    there = [value for value in wanted if value is not None]
    assert [None if np.isnan(value) else pytest.approx(value) for value in metric.per_class()] == wanted
    assert metric.compute() == pytest.approx(sum(there) / len(there))
    assert metric.pixel_accuracy() == pytest.approx(accuracy)


@pytest.mark.parametrize("ignored", [None, 255])
def test_image_by_image(ignored: int | None) -> None:
    pairs = images(ignored=ignored)
    metric = MeanImageIoU(CLASSES, ignored)
    for pred, target in pairs:
        metric.update(pred, target)
    wanted = []
    for pair in pairs:
        there = [value for value in slow([pair], ignored)[0] if value is not None]
        wanted.append(sum(there) / len(there))
    assert metric.values == pytest.approx(wanted)
    assert metric.compute() == pytest.approx(sum(wanted) / len(wanted))


def test_against_torchmetrics() -> None:
    pairs = images(8, seed=1)
    ours, theirs = MeanIoU(CLASSES), MulticlassJaccardIndex(CLASSES, average=None)
    for pred, target in pairs:
        ours.update(pred, target)
        theirs.update(torch.from_numpy(pred).flatten(), torch.from_numpy(target).flatten())
    assert ours.per_class() == pytest.approx(theirs.compute().numpy(), abs=1e-6)


def test_classes_that_are_nowhere_do_not_count() -> None:
    metric = MeanIoU(4)
    metric.update([[0, 0, 1]], [[0, 0, 2]])
    assert np.isnan(metric.per_class()).tolist() == [False, False, False, True]
    assert metric.compute() == pytest.approx(1 / 3)  # class 1 was predicted, class 2 was missed
    single = MeanIoU(1)
    single.update([[0]], [[0]])
    assert single.compute() == single.pixel_accuracy() == 1


@pytest.mark.parametrize(("pred", "target", "message"), [
    ([[4]], [[0]], r"pred has ids \[4\], classes are 0 to 3"),
    ([[0]], [[7]], r"target has ids \[7\], classes are 0 to 3 and ignore_index is 255"),
    ([[-1]], [[0]], r"pred has ids \[-1\]"),
    ([[0, 1]], [[0]], "maps of one image"),
    ([[0.0]], [[0]], "integers"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [MeanIoU, MeanImageIoU])
def test_ids_out_of_range_and_maps_that_do_not_fit(kind: Any, pred: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(4, 255).update(np.asarray(pred), np.asarray(target))


def test_ignored_everywhere() -> None:
    metric = MeanIoU(3, 255)
    metric.update([[1]], [[255]])  # an image without labels is no mistake in a set
    for ask in (metric.compute, metric.pixel_accuracy):
        with pytest.raises(ValueError, match="no pixel has been counted"):
            ask()
    with pytest.raises(ValueError, match="everywhere"):
        MeanImageIoU(3, 255).update([[1]], [[255]])
    with pytest.raises(ValueError, match="no image"):
        MeanImageIoU(3).compute()
    for kind in (MeanIoU, MeanImageIoU):
        with pytest.raises(ValueError, match="num_classes"):
            kind(0)
