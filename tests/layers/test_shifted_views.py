"""Views against loops over pixels and cells."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from regista.layers.shifted_views import accumulate, coverage, farthest_points, sample_views, view_of

PATCH = 3
FILL = (2.25, 2.5, 2.75)
OFFSETS = list(itertools.product((-3, -1, 0, 2), (-4, 0, 1, 3)))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_view(images: Tensor, offset: tuple[int, int], flip: bool) -> Tensor:
    """Pixel by pixel."""
    batch, channels, height, width = images.shape
    view = torch.empty_like(images)
    for b, c, y, x in itertools.product(range(batch), range(channels), range(height), range(width)):
        across = width - 1 - x if flip else x
        row, col = y + offset[0] * PATCH, across + offset[1] * PATCH
        inside = 0 <= row < height and 0 <= col < width
        view[b, c, y, x] = images[b, c, row, col] if inside else FILL[c]
    return view


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
def test_view_equals_a_loop_over_pixels(offset: tuple[int, int], flip: bool) -> None:
    images = torch.rand(2, 3, 4 * PATCH, 5 * PATCH, generator=seeded())
    before = images.clone()
    view = view_of(images, offset, flip, PATCH, FILL)
    assert torch.equal(view, slow_view(images, offset, flip))
    assert torch.equal(images, before)


@pytest.mark.parametrize("offset", OFFSETS)
def test_share_of_fill(offset: tuple[int, int]) -> None:
    view = view_of(torch.zeros(1, 3, 4 * PATCH, 5 * PATCH), offset, False, PATCH, FILL)
    filled = (view == torch.tensor(FILL).view(1, 3, 1, 1)).float().mean()
    assert filled.item() == pytest.approx(1 - (1 - abs(offset[0]) / 4) * (1 - abs(offset[1]) / 5))


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_way_back_restores_what_survived(offset: tuple[int, int]) -> None:
    images = torch.rand(1, 3, 4 * PATCH, 5 * PATCH, generator=seeded())
    there = view_of(images, offset, False, PATCH, FILL)
    back = view_of(there, (-offset[0], -offset[1]), False, PATCH, (float("nan"),) * 3)
    kept = back.isfinite() & (back != torch.tensor(FILL).view(1, 3, 1, 1))
    assert torch.equal(back[kept], images[kept])
    assert int(kept.sum()) == 3 * PATCH**2 * (4 - abs(offset[0])) * (5 - abs(offset[1]))


@pytest.mark.parametrize("flip", [False, True])
def test_features_come_back_to_their_cells(flip: bool) -> None:
    """Each cell of a view carries the number of the image's cell it shows, read from its pixels."""
    numbers = torch.arange(1.0, 21).view(1, 1, 4, 5)
    images = numbers.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3).repeat(1, 3, 1, 1)
    for offset in OFFSETS:
        view = view_of(images, offset, flip, PATCH, (0, 0, 0))
        features = view.select(1, 0)[:, ::PATCH, ::PATCH].flatten(1).unsqueeze(-1)
        total = torch.zeros(1, 4, 5, 1)
        accumulate(total, features, offset, flip, weight=3)
        seen = coverage((4, 5), torch.tensor([offset])).view(1, 4, 5, 1)
        assert torch.equal(total, 3 * seen * numbers.view(1, 4, 5, 1))


def test_accumulate_adds_half_precision_into_float32_and_checks_shapes() -> None:
    total = torch.ones(2, 3, 4, 5)
    accumulate(total, torch.full((2, 12, 5), 0.5, dtype=torch.bfloat16), (0, 0), True)
    assert total.dtype == torch.float32
    assert torch.equal(total, torch.full_like(total, 1.5))
    with pytest.raises(ValueError, match=r"\(2, 12, 5\).*got \(2, 13, 5\)"):
        accumulate(total, torch.ones(2, 13, 5), (0, 0), False)


@pytest.mark.parametrize("seed", range(20))
def test_coverage_equals_counting_and_has_its_closed_forms(seed: int) -> None:
    rows, cols = (37, 28) if seed % 2 else (9, 13)
    offsets, _ = sample_views((rows, cols), generator=seeded(seed))
    counted = torch.zeros(rows, cols, dtype=torch.long)
    for dy, dx in offsets.tolist():
        for y, x in itertools.product(range(rows), range(cols)):  # cell (y, x) of the view
            if 0 <= y + dy < rows and 0 <= x + dx < cols:
                counted[y + dy, x + dx] += 1
    found = coverage((rows, cols), offsets)
    assert torch.equal(found, counted)
    assert found.min() >= 1
    down, across = round(0.15 * rows), round(0.15 * cols)
    assert (found[down : rows - down, across : cols - across] == 10).all()


@pytest.mark.parametrize(("grid_size", "ratio", "reach"), [
    ((37, 37), 0.15, (6, 6)),
    ((28, 28), 0.15, (4, 4)),
    ((10, 30), 0.15, (2, 4)),  # 1.5 and 4.5: halves to even
    ((3, 5), 0.9, (2, 4)),  # never the whole grid
    ((37, 1), 0.15, (6, 0)),
    ((1, 1), 0.5, (0, 0)),
    ((37, 37), 0, (0, 0)),
])  # fmt: skip
def test_range_of_the_offsets(grid_size: tuple[int, int], ratio: float, reach: tuple[int, int]) -> None:
    drawn = [sample_views(grid_size, 10, ratio, seeded(seed)) for seed in range(60)]
    offsets = torch.stack([offset for offset, _ in drawn])
    assert tuple(offsets.abs().amax((0, 1)).tolist()) == reach
    assert tuple(offsets.amax((0, 1)).tolist()) == reach  # both ends of the range come
    assert tuple((-offsets).amax((0, 1)).tolist()) == reach
    for offset, flip in drawn:
        assert offset.shape == (10, 2)
        assert offset.dtype == torch.long
        assert flip.shape == (10,)
        assert flip.dtype == torch.bool
        assert not offset[0].any()
        assert not flip[0]
    flips = torch.stack([flip for _, flip in drawn])
    assert flips.float().sum(1).mean() == pytest.approx(4.5, abs=0.7)


def smallest_distance(points: Tensor) -> float:
    return float(torch.pdist(points.double()).min())


def test_the_others_are_distinct_and_spread() -> None:
    spread, random = [], []
    again = 0
    for seed in range(300):
        offsets, _ = sample_views((37, 37), generator=seeded(seed))
        others = offsets[1:]
        assert len({tuple(offset) for offset in others.tolist()}) == 9
        again += [0, 0] in others.tolist()
        spread.append(smallest_distance(others))
        random.append(smallest_distance(torch.randint(-6, 7, (9, 2), generator=seeded(seed))))
    assert sum(spread) > 2 * sum(random)
    assert 5 <= again <= 32  # 5.7 % in 2000 draws of the released sampler


def test_farthest_points_equals_a_loop() -> None:
    points = torch.randint(-6, 7, (100, 2), generator=seeded(3))
    chosen = [17]
    while len(chosen) < 10:
        distances = [min(float((point - points[other]).square().sum()) for other in chosen) for point in points]
        chosen.append(distances.index(max(distances)))
    assert farthest_points(points, 10, 17).tolist() == chosen


def test_a_generator_makes_it_reproducible_and_the_global_one_is_left_alone() -> None:
    state = torch.get_rng_state()
    first = sample_views((20, 30), 7, 0.2, seeded(5))
    again = sample_views((20, 30), 7, 0.2, seeded(5))
    other = sample_views((20, 30), 7, 0.2, seeded(6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(0)
    free = [sample_views((37, 37))[0] for _ in range(3)]
    torch.manual_seed(0)
    free += [sample_views((37, 37))[0] for _ in range(3)]
    assert len({str(offsets.tolist()) for offsets in free}) == 6
    torch.set_rng_state(state)
    sample_views((37, 37))
    assert torch.equal(torch.get_rng_state(), state)


def test_one_view_is_the_image() -> None:
    offsets, flips = sample_views((37, 37), 1, generator=seeded())
    assert offsets.tolist() == [[0, 0]]
    assert flips.tolist() == [False]


@pytest.mark.parametrize(("arguments", "message"), [
    (((0, 5),), "both at least 1"),
    (((5, 5), 0), "num_views"),
    (((5, 5), 2.5), "num_views"),
    (((5, 5), True), "num_views"),
    (((5, 5), 10, -0.1), r"\[0, 1\)"),
    (((5, 5), 10, 1.0), r"\[0, 1\)"),
    (((5, 5), 10, float("nan")), r"\[0, 1\)"),
])  # fmt: skip
def test_nonsense_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_views(*arguments)
