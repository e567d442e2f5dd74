"""Depth errors against loops, and known cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from regista.metrics import depth_metrics


def test_against_loops() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        size = tuple(rng.integers(2, 8, 2))
        target, pred = rng.uniform(0, 12, size), rng.uniform(-1, 13, size)
        valid = rng.random(size) < 0.7
        target[0, 0], valid[0, 0] = 3.0, True
        errors: dict[str, list[float]] = {name: [] for name in ("square", "abs_rel", "log10", "d1", "d2", "d3")}
        for place in np.ndindex(target.shape):
            t = float(target[place])
            if not valid[place] or not 1e-3 < t <= 10:
                continue
            p = min(max(float(pred[place]), 1e-3), 10)
            errors["square"].append((p - t) ** 2)
            errors["abs_rel"].append(abs(p - t) / t)
            errors["log10"].append(abs(math.log10(p) - math.log10(t)))
            for power in (1, 2, 3):
                errors[f"d{power}"].append(float(max(p / t, t / p) < 1.25**power))
        mean = {name: sum(values) / len(values) for name, values in errors.items()}
        wanted = {"rmse": math.sqrt(mean["square"]), "abs_rel": mean["abs_rel"], "delta1": mean["d1"]}
        wanted |= {"delta2": mean["d2"], "delta3": mean["d3"], "log10": mean["log10"]}
        assert depth_metrics(torch.from_numpy(pred), target, valid) == pytest.approx(wanted)


def test_perfect_and_scaled() -> None:
    target = np.full((3, 4), 2.0)
    assert depth_metrics(target, target) == {
        "rmse": 0, "abs_rel": 0, "delta1": 1, "delta2": 1, "delta3": 1, "log10": 0
    }  # fmt: skip
    found = depth_metrics(1.3 * target, target)
    assert found["rmse"] == pytest.approx(0.6)
    assert found["abs_rel"] == pytest.approx(0.3)
    assert (found["delta1"], found["delta2"]) == (0, 1)


@pytest.mark.parametrize(("pred", "target", "options", "message"), [
    (np.ones((2, 2)), np.ones((2, 3)), {}, "depth maps of one image"),
    (np.ones(4), np.ones(4), {}, r"\(H, W\)"),
    (np.ones((2, 2)), np.zeros((2, 2)), {}, "no pixel counts"),
    (np.ones((2, 2)), np.full((2, 2), np.nan), {}, "no pixel counts"),
    (np.full((2, 2), np.nan), np.ones((2, 2)), {}, "NaN"),
    (np.ones((2, 2)), np.ones((2, 2)), {"valid": np.zeros((2, 2), dtype=bool)}, "no pixel counts"),
    (np.ones((2, 2)), np.ones((2, 2)), {"valid": np.ones((2, 2))}, "bool map"),
    (np.ones((2, 2)), np.ones((2, 2)), {"min_depth": 3.0, "max_depth": 2.0}, "min_depth < max_depth"),
])  # fmt: skip
def test_maps_that_do_not_fit(pred: Any, target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        depth_metrics(pred, target, **options)
