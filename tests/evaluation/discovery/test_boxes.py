"""Boxes and coarse masks of cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regista.evaluation.discovery import box_of, coarse_mask


def test_box_around_cells() -> None:
    mask = np.zeros((3, 5), dtype=bool)
    mask[1, 2] = mask[2, 4] = True
    assert box_of(mask, 10) == (20, 10, 50, 30)
    assert box_of(mask, 10, (25, 44)) == (20, 10, 44, 25)
    with pytest.raises(ValueError, match="no cell"):
        box_of(np.zeros((3, 5), dtype=bool), 10)


def test_the_largest_piece_above_the_rule() -> None:
    scores = torch.zeros(4, 6)
    scores[0, 0] = 5.0
    scores[2:4, 3:5] = 4.0
    assert np.argwhere(coarse_mask(scores)).tolist() == [[2, 3], [2, 4], [3, 3], [3, 4]]
    values = scores.double()
    assert float(values[2, 3]) > float(values.mean() + values.std(unbiased=False))


def test_equal_scores_give_one_cell() -> None:
    assert np.argwhere(coarse_mask(torch.ones(3, 4))).tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="finite"):
        coarse_mask(torch.full((2, 2), float("nan")))
