"""Box overlap against pixels, and CorLoc."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regista.metrics import box_iou, corloc


def test_overlap_is_that_of_the_pixels() -> None:
    rng = np.random.default_rng(0)
    low = rng.integers(0, 12, (20, 2))
    boxes = np.concatenate([low, low + rng.integers(1, 9, (20, 2))], 1)
    found = box_iou(boxes[:8], boxes[8:])
    for i, a in enumerate(boxes[:8].tolist()):
        for j, b in enumerate(boxes[8:].tolist()):
            inside = [{(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (a, b)]
            assert found[i, j] == pytest.approx(len(inside[0] & inside[1]) / len(inside[0] | inside[1]))
    assert box_iou([(0, 0, 0, 0)], [(0, 0, 0, 0)]).tolist() == [[0]]


def test_share_of_hits() -> None:
    objects = [[(0, 0, 10, 10), (20, 20, 30, 30)], [(0, 0, 4, 4)], [(5, 5, 9, 9)], [(0, 0, 2, 1)]]
    boxes = [(21, 20, 30, 30), (0, 0, 4, 2), None, (0, 0, 2, 3)]
    assert corloc(boxes, objects) == pytest.approx(2 / 4)  # 0.9 and 0.5 hit, a miss, a third misses
    assert corloc(boxes, objects, threshold=0.6) == pytest.approx(1 / 4)


@pytest.mark.parametrize(("pred", "target", "message"), [
    ([], [], "a box and a list of boxes an image"),
    ([None], [[(0, 0, 1, 1)], [(0, 0, 1, 1)]], "got 1 and 2"),
    ([(0, 0, 1, 1)], [[]], "image 0 has no object"),
    ([(3, 0, 1, 1)], [[(0, 0, 1, 1)]], "ends before it begins"),
    ([(3, 0, 1)], [[(0, 0, 1, 1)]], r"\(n, 4\)"),
    ([(0, 0, float("nan"), 1)], [[(0, 0, 1, 1)]], "not finite"),
])  # fmt: skip
def test_mistakes(pred: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corloc(pred, target)
