"""Maps that fool a detector of second modes: equal values, repeated cells, slanted lines, regions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regista.diagnosis.modes import second_mode
from regista.diagnosis.outliers import find_outliers

SHAPES = [(1, 5, 6), (1, 16, 16), (4, 14, 10), (8, 37, 37)]


def found(maps: np.ndarray) -> np.ndarray:
    return find_outliers(torch.from_numpy(maps)).mask.numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("height", [2.0, 3.2, 20.0])
def test_dots_on_a_constant_map_are_found(shape: tuple[int, int, int], height: float) -> None:
    truth = np.zeros(shape, bool)
    truth[:, 1, 2] = truth[:, 3, 4] = True
    assert np.array_equal(found(np.where(truth, 40.0 * height, 40.0)), truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_dot_in_few_patches_is_found(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    maps = 40 * np.exp(0.05 * rng.standard_normal(shape))
    truth = np.zeros(shape, bool)
    truth[0, 2, 3] = True
    assert np.array_equal(found(np.where(truth, 200.0, maps)), truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_heavy_tail_over_cells_that_repeats_in_all_images_is_clean(shape: tuple[int, int, int]) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        for cells in (np.abs(rng.standard_t(3, shape[1:])), 4 + np.abs(rng.standard_t(3, shape[1:]))):
            noise = np.exp(0.02 * rng.standard_normal(shape))
            assert not found((0.01 + cells) * noise).any()


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("name", ["diagonal", "disc", "block", "half", "frame", "columns", "band", "checks"])
def test_patterns_of_the_field_are_clean(name: str, noise: float) -> None:
    rows, cols = np.mgrid[0:20, 0:20]
    pattern = {
        "diagonal": rows == cols,
        "disc": np.hypot(rows - 8, cols - 11) < 4,
        "block": (rows > 3) & (rows < 10) & (cols > 8) & (cols < 14),
        "half": cols < 8,
        "frame": np.minimum(np.minimum(rows, 19 - rows), np.minimum(cols, 19 - cols)) == 0,
        "columns": cols % 4 == 1,
        "band": (rows == 5) | (rows == 6),
        "checks": (rows + cols) % 3 == 0,
    }[name]
    maps = np.where(pattern, 2.2, 1.0) * np.exp(noise * np.random.default_rng(0).standard_normal((3, 20, 20)))
    assert not found(maps).any()


def test_dots_are_found_beside_a_pattern() -> None:
    rng = np.random.default_rng(0)
    maps = np.exp(0.05 * rng.standard_normal((4, 20, 20)))
    maps[:, :, 5] *= 1.8
    truth = rng.random(maps.shape) < 0.02
    maps[truth] = 8 * rng.uniform(1, 1.5, truth.sum())
    assert np.array_equal(found(maps), truth)


def test_of_two_groups_of_outliers_both_are_found() -> None:
    rng = np.random.default_rng(0)
    maps = np.exp(0.08 * rng.standard_normal((4, 20, 20)))
    truth = rng.random(maps.shape) < 0.04
    maps[truth] = np.where(rng.random(truth.sum()) < 0.5, 3.4, 25)
    assert np.array_equal(found(maps), truth)


def test_an_outcome_unpacks_and_padding_may_hold_anything() -> None:
    norms = torch.full((2, 8, 8), 3.0)
    norms[1, 2, 2] = 30
    norms[:, 6:] = float("nan")
    valid = torch.ones(norms.shape, dtype=torch.bool)
    valid[:, 6:] = False
    cutoff, mask, share = find_outliers(norms, valid=valid)
    assert 3 < cutoff < 30
    assert mask.nonzero().tolist() == [[1, 2, 2]]
    assert share == pytest.approx(1 / 96)


@pytest.mark.parametrize("family", ["gauss", "pareto", "student", "cauchy", "gamma", "log-normal"])
def test_single_modes_raise_few_alarms(family: str) -> None:
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = {
            "gauss": lambda: (40 + 8 * rng.standard_normal(1000)).clip(1),  # noqa: B023
            "pareto": lambda: rng.pareto(1.5, 1000) + 1,  # noqa: B023
            "student": lambda: 40 + 4 * np.abs(rng.standard_t(3, 1000)),  # noqa: B023
            "cauchy": lambda: np.abs(rng.standard_cauchy(1000)),  # noqa: B023
            "gamma": lambda: rng.gamma(0.7, 1, 1000),  # noqa: B023
            "log-normal": lambda: np.exp(rng.standard_normal(1000)),  # noqa: B023
        }[family]()
        alarms += second_mode(np.log(values / np.median(values)), least=np.log(1.5)) is not None
    assert alarms <= 3
