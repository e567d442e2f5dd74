"""Adjusted Rand index against scikit-learn, against pairs of pixels one by one, and at large sizes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from regista.metrics import adjusted_rand_index
from tests.metrics.random_maps import pairs


def test_against_scikit_learn() -> None:
    for pred, target in pairs(80):
        wanted = adjusted_rand_score(target.reshape(-1), pred.reshape(-1))
        assert adjusted_rand_index(pred, target) == pytest.approx(wanted, abs=1e-12)


def test_against_pairs_of_pixels() -> None:
    for pred, target in pairs(15):
        p, t = pred.reshape(-1).tolist(), target.reshape(-1).tolist()
        agree = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
        for a, b in combinations(range(len(p)), 2):
            agree[t[a] == t[b], p[a] == p[b]] += 1
        both, in_target = agree[True, True], agree[True, True] + agree[True, False]
        in_pred, all_pairs = both + agree[False, True], sum(agree.values())
        if all_pairs == 0 or in_target + in_pred == 2 * in_target * in_pred / all_pairs:
            continue  # both are trivial
        expected = in_target * in_pred / all_pairs
        assert adjusted_rand_index(pred, target) == pytest.approx(
            (both - expected) / ((in_target + in_pred) / 2 - expected)
        )


def test_without_the_background() -> None:
    target = np.array([[0, 0, 1, 1, 2, 2]])
    pred = np.array([[7, 8, 1, 1, 2, 2]])
    assert adjusted_rand_index(pred, target) < 1
    assert adjusted_rand_index(pred, target, ignore_index=0) == 1
    assert adjusted_rand_index(np.array([[0, 0, 0, 1]]), np.array([[5, 5, 5, 5]])) == 0  # one object: says nothing


def test_large_images_do_not_overflow() -> None:
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, (3000, 2000))
    assert adjusted_rand_index(target, target) == 1
    assert abs(adjusted_rand_index(rng.integers(0, 3, target.shape), target)) < 1e-5
