"""LOST against its steps written out with the whole matrix, and on planted grids."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regista.evaluation.discovery import lost, lost_mask


def slow(features: Tensor, grid: tuple[int, int], k: int, bias: float) -> set[tuple[int, int]]:
    """The paper's steps: a full matrix, a sort, a flood fill."""
    f = features.double().numpy()
    a = f @ f.T + bias
    n = len(f)
    degree = [sum(1 for q in range(n) if q != p and a[p, q] > 0) for p in range(n)]
    order = sorted(range(n), key=lambda p: degree[p])
    seed = order[0]
    chosen = [p for p in order[:k] if a[seed, p] > 0]
    total = a[chosen].sum(0) if chosen else np.zeros(n)
    _, cols = grid
    start = divmod(seed, cols)
    inside = {divmod(p, cols) for p in range(n) if total[p] > 0}
    if start not in inside:
        return {start}
    reached, queue = {start}, deque([start])
    while queue:
        r, c = queue.popleft()
        for near in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
            if near in inside and near not in reached:
                reached.add(near)
                queue.append(near)
    return reached


@pytest.mark.parametrize("bias", [0.0, 0.5, -0.5, -30.0])
@pytest.mark.parametrize("k", [1, 7, 1000])
def test_against_the_whole_matrix(k: int, bias: float) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        rows, cols = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
        features = torch.randn(rows * cols, 6, generator=generator) + (seed % 3)
        cells = slow(features, (rows, cols), k, bias)
        mask = lost_mask(features, (rows, cols), k=k, bias=bias)
        assert {tuple(cell) for cell in np.argwhere(mask).tolist()} == cells
        found = lost(features, (rows, cols), 14, k=k, bias=bias)
        ys, xs = zip(*cells, strict=True)
        assert found == (14 * min(xs), 14 * min(ys), 14 * (max(xs) + 1), 14 * (max(ys) + 1))


def planted(rows: int, cols: int, top: int, left: int, height: int, width: int) -> Tensor:
    """An object whose features oppose those of the background around it, with some noise."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(32, 2, generator=generator))[0].T  # two orthogonal ones
    grid = directions[0].expand(rows, cols, 32).clone()  # (rows, cols, 32)
    grid[top : top + height, left : left + width] = directions[1] - 0.5 * directions[0]
    return (grid + 0.02 * torch.randn(grid.shape, generator=generator)).reshape(rows * cols, 32)


@pytest.mark.parametrize("place", [(2, 3, 4, 5), (0, 0, 3, 3), (5, 8, 1, 2)])
def test_a_planted_object_is_found(place: tuple[int, int, int, int]) -> None:
    top, left, height, width = place
    features = planted(9, 13, *place)
    wanted = (16 * left, 16 * top, 16 * (left + width), 16 * (top + height))
    assert lost(features, (9, 13), 16) == wanted
    assert lost(7 * features, (9, 13), 16) == wanted
    assert lost(features.half(), (9, 13), 16) == wanted


def test_an_outlier_breaks_it() -> None:
    """One token of large norm and its own direction has the lowest degree: the seed is the artifact."""
    features = planted(9, 13, 2, 3, 4, 5)
    whole = lost(features, (9, 13), 16)
    features[9 * 13 - 2] = -20 * features.mean(0) - 10 * features[2 * 13 + 3]
    assert lost(features, (9, 13), 16) != whole


def test_features_that_are_all_alike_give_the_whole_image() -> None:
    assert lost(torch.ones(12, 3), (3, 4), 16) == (0, 0, 64, 48)
    assert lost(torch.ones(12, 3), (3, 4), 16, image_size=(40, 63)) == (0, 0, 63, 40)


def test_more_patches_than_a_piece() -> None:
    features = torch.randn(40 * 30, 8, generator=torch.Generator().manual_seed(1))
    assert {tuple(cell) for cell in np.argwhere(lost_mask(features, (40, 30))).tolist()} == slow(
        features, (40, 30), 100, 0.0
    )


@pytest.mark.parametrize(("features", "options", "message"), [
    (torch.ones(5, 3), {}, r"P = 2 x 3, got \(5, 3\)"),
    (torch.ones(6), {}, r"\(P, D\)"),
    (torch.full((6, 2), float("nan")), {}, "NaN"),
    (torch.ones(6, 2), {"k": 0}, "k is at least 1"),
])  # fmt: skip
def test_mistakes(features: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lost(features, (2, 3), 14, **options)
