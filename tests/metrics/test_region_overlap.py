"""Overlap of regions against sets of pixels and every possible matching."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from regista.metrics import adjusted_rand_index, many_to_one_miou, mean_best_overlap, one_to_one_miou
from regista.metrics.contingency import count_overlaps
from tests.metrics.random_maps import pairs

ALL = (many_to_one_miou, one_to_one_miou, mean_best_overlap, adjusted_rand_index)
Pixels = dict[int, set[tuple[int, int]]]


def regions(labels: np.ndarray, counted: np.ndarray) -> Pixels:
    found: Pixels = {}
    for place in np.ndindex(labels.shape):
        if counted[place]:
            found.setdefault(int(labels[place]), set()).add(place)
    return found


def iou(a: set[Any], b: set[Any]) -> float:
    return len(a & b) / len(a | b)


def slow_many_to_one(pred: Pixels, target: Pixels, assign: str) -> float:
    merged: Pixels = {key: set() for key in target}
    for pixels in pred.values():
        score = {
            key: len(pixels & wanted) if assign == "overlap" else iou(pixels, wanted) for key, wanted in target.items()
        }
        best = max(score.values())
        owner = min(key for key, value in score.items() if value == best)
        merged[owner] |= pixels
    return sum(iou(merged[key], wanted) for key, wanted in target.items()) / len(target)


def slow_one_to_one(pred: Pixels, target: Pixels) -> float:
    few, many = sorted((list(pred.values()), list(target.values())), key=len)
    best = max(sum(iou(a, b) for a, b in zip(few, chosen, strict=True)) for chosen in permutations(many, len(few)))
    return best / len(target)


def slow_best_overlap(pred: Pixels, target: Pixels) -> float:
    return sum(max(iou(pixels, wanted) for pixels in pred.values()) for wanted in target.values()) / len(target)


@pytest.mark.parametrize("ignored", [None, 3, [3, 7]])
def test_against_sets_of_pixels(ignored: Any) -> None:
    compared = 0
    for pred, target in pairs(60):
        counted = ~np.isin(target, [] if ignored is None else ignored)
        if not counted.any():
            with pytest.raises(ValueError, match="everywhere"):
                many_to_one_miou(pred, target, ignored)
            continue
        slow_pred, slow_target = regions(pred, counted), regions(target, counted)
        compared += 1
        for assign in ("overlap", "iou"):
            wanted = slow_many_to_one(slow_pred, slow_target, assign)
            assert many_to_one_miou(pred, target, ignored, assign=assign) == pytest.approx(wanted, abs=1e-12)  # type: ignore[arg-type]
        one = one_to_one_miou(pred, target, ignored)
        best = mean_best_overlap(pred, target, ignored)
        assert one == pytest.approx(slow_one_to_one(slow_pred, slow_target), abs=1e-12)
        assert best == pytest.approx(slow_best_overlap(slow_pred, slow_target), abs=1e-12)
        assert one <= best + 1e-12
    assert compared > 40


def test_many_to_one_may_be_below_one_to_one() -> None:
    """It is no upper bound: a region that is split between two targets counts against both."""
    found = [(many_to_one_miou(pred, target), one_to_one_miou(pred, target)) for pred, target in pairs(300, seed=3)]
    assert any(many < one - 1e-9 for many, one in found)
    assert any(many > one + 1e-9 for many, one in found)


@pytest.mark.parametrize("metric", ALL)
def test_equal_maps_and_other_names(metric: Any) -> None:
    for pred, target in pairs(20):
        assert metric(target, target) == pytest.approx(1)
        assert metric(target * 5 - 40, target) == pytest.approx(1)
        assert metric(pred + 2**40, target) == pytest.approx(metric(pred, target))
        assert metric(torch.from_numpy(pred), torch.from_numpy(target)) == metric(pred, target)
        assert metric(pred.astype(np.int16).T, target.T) == pytest.approx(metric(pred, target))
    assert metric(np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=np.uint8)) == pytest.approx(1)


def test_constant_prediction() -> None:
    target = np.array([[0, 0, 0, 1], [0, 0, 0, 1]])
    one = np.zeros_like(target)
    assert many_to_one_miou(one, target) == pytest.approx(0.75 / 2)  # all goes to region 0, region 1 gets nothing
    assert one_to_one_miou(one, target) == pytest.approx(0.75 / 2)
    assert mean_best_overlap(one, target) == pytest.approx((0.75 + 0.25) / 2)
    assert adjusted_rand_index(one, target) == 0


def test_the_table() -> None:
    table = count_overlaps([[5, 5, -2]], np.array([[9, 1, 1]]))
    assert table.target_ids.tolist() == [1, 9]
    assert table.pred_ids.tolist() == [-2, 5]
    assert table.counts.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize(("pred", "target", "message"), [
    (np.zeros((2, 3), dtype=int), np.zeros((3, 2), dtype=int), r"\(2, 3\) and \(3, 2\)"),
    (np.zeros((2, 3)), np.zeros((2, 3), dtype=int), "pred holds ids, which are integers"),
    (np.zeros((2, 3), dtype=int), np.zeros((1, 2, 3), dtype=int), r"target is an integer map .* got shape \(1, 2, 3\)"),
    (np.zeros((0, 3), dtype=int), np.zeros((0, 3), dtype=int), "integer map"),
])  # fmt: skip
def test_maps_that_do_not_fit(metric: Any, pred: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(pred, target)


def test_another_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'overlap' or 'iou', got 'most'"):
        many_to_one_miou(np.zeros((1, 1), dtype=int), np.zeros((1, 1), dtype=int), assign="most")  # type: ignore[arg-type]
