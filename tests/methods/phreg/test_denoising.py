"""Denoising against loops over views and cells, and against what its definition implies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista.backbones.base import Backbone
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg import denoise, denoise_with_statistics, sample_views
from tests.methods.phreg.stubs import WHITE, StubBackbone, cell_numbers, patch_statistics, position_dependent, spike_at
from tests.tolerances import assert_close

Views = tuple[Tensor, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(batch: int, rows: int, cols: int, patch: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, rows * patch, cols * patch, generator=seeded(seed))


def raw_views(backbone: Backbone, images: Tensor, views: Views, white: list[float]) -> tuple[Tensor, Tensor]:
    """Pixel by pixel and cell by cell: features (V, B, rows, cols, D) in the image's cells, NaN where unseen."""
    size = backbone.patch_size
    batch, _, height, width = images.shape
    rows, cols = height // size, width // size
    collected = []
    for (dy, dx), flip in zip(views[0].tolist(), views[1].tolist(), strict=True):
        view = torch.tensor(white).view(1, 3, 1, 1).repeat(batch, 1, height, width)
        place = {}
        for y, x in itertools.product(range(rows), range(cols)):
            row, col = y + dy, (cols - 1 - x if flip else x) + dx
            if 0 <= row < rows and 0 <= col < cols:
                patch = images[..., row * size : (row + 1) * size, col * size : (col + 1) * size]
                view[..., y * size : (y + 1) * size, x * size : (x + 1) * size] = patch.flip(-1) if flip else patch
                place[y, x] = (row, col)
        patches = backbone(view).patches.detach()
        own = torch.full((batch, rows, cols, patches.shape[-1]), float("nan"))
        for (y, x), (row, col) in place.items():
            own[:, row, col] = patches[:, y * cols + x]
        collected.append(own)
    stacked = torch.stack(collected)
    return stacked, stacked.nanmean(0)


@pytest.mark.parametrize(("registers", "cls"), [(0, 1), (4, 1), (1, 0), (0, 0)])
def test_equals_loops_on_a_real_vit(registers: int, cls: int) -> None:
    backbone = tiny_vit(num_register_tokens=registers, class_token=bool(cls), patch_size=8)
    images = random_images(2, 4, 6, 8)
    views = sample_views((4, 6), 6, 0.4, seeded(3))
    white = [(1 - mean) / std for mean, std in zip(backbone.mean, backbone.std, strict=True)]
    _, wanted = raw_views(backbone, images, views, white)
    found = denoise(backbone, images, views=views)
    assert found.shape == (2, 24, 64)
    assert not found.requires_grad
    assert_close(found, wanted.flatten(1, 2))
    assert (found - backbone(images).patches).abs().max() > 0.1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grid", [(8, 8), (5, 9)])
def test_equals_loops_with_white_of_the_backbone(grid: tuple[int, int], seed: int) -> None:
    backbone = StubBackbone(position_dependent, num_register_tokens=2)
    images = random_images(2, *grid)
    views = sample_views(grid, 10, 0.3, seeded(seed))
    stacked, wanted = raw_views(backbone, images, views, WHITE)
    backbone.seen.clear()
    found = denoise_with_statistics(backbone, images, views=views)
    assert_close(found.patches, wanted.flatten(1, 2))
    assert torch.equal(found.coverage, stacked[:, 0, :, :, 0].isfinite().sum(0))
    raw = backbone(images).patches
    assert found.shrinkage is not None
    assert_close(found.shrinkage, wanted.norm(dim=-1).mean((1, 2)) / raw.norm(dim=-1).mean(1))
    # no longer than the longest of its views, inside their range, and nearer to them than anything else
    filled = stacked.nan_to_num(nan=0)
    assert (wanted.norm(dim=-1) <= filled.norm(dim=-1).amax(0) + 1e-5).all()
    mean = torch.unflatten(found.patches, 1, grid)
    assert (mean <= stacked.nan_to_num(nan=-1e9).amax(0) + 1e-5).all()
    assert (mean >= stacked.nan_to_num(nan=1e9).amin(0) - 1e-5).all()
    best = (stacked - mean).square().nansum((0, -1))
    for _ in range(5):
        assert (best < (stacked - mean - 0.1 * torch.randn_like(mean)).square().nansum((0, -1))).all()


def test_what_moves_with_the_image_is_kept() -> None:
    backbone = StubBackbone(patch_statistics)
    images = random_images(3, 37, 37)
    found = denoise_with_statistics(backbone, images, generator=seeded())
    own = patch_statistics(images, (37, 37))
    assert_close(found.patches, own)
    exact = ((found.coverage == 1) | (found.coverage == 2) | (found.coverage == 4)).flatten()
    assert exact.any()
    maxima = slice(3, 6)  # the means add a flipped patch in another order
    assert torch.equal(found.patches[:, exact, maxima], own[:, exact, maxima])
    assert found.shrinkage is not None
    assert_close(found.shrinkage, torch.ones(3))


@pytest.mark.parametrize("grid", [(9, 9), (6, 11)])
def test_an_artifact_of_place_is_spread(grid: tuple[int, int]) -> None:
    """F*(r, c) is the mean of r - dy and of c - dx, or (cols - 1) - (c - dx) where flipped."""
    offsets, flips = sample_views(grid, 10, 0.3, seeded(4))
    found = torch.unflatten(
        denoise(StubBackbone(cell_numbers), random_images(1, *grid), views=(offsets, flips))[0], 0, grid
    )
    for r, c in itertools.product(range(grid[0]), range(grid[1])):
        rows, cols = [], []
        for (dy, dx), flip in zip(offsets.tolist(), flips.tolist(), strict=True):
            if 0 <= r - dy < grid[0] and 0 <= c - dx < grid[1]:
                rows.append(r - dy)
                cols.append(grid[1] - 1 - (c - dx) if flip else c - dx)
        assert found[r, c].tolist() == pytest.approx([sum(rows) / len(rows), sum(cols) / len(cols)], abs=1e-5)


def test_a_spike_is_divided() -> None:
    offsets, flips = sample_views((15, 15), 10, 0.2, seeded(2))
    for row, col in ((7, 7), (0, 3), (14, 14)):
        found = denoise_with_statistics(
            StubBackbone(spike_at(row, col)), random_images(1, 15, 15), views=(offsets, flips)
        )
        grid = torch.unflatten(found.patches[0, :, 0], 0, (15, 15))
        assert int((grid > 0).sum()) <= 10
        assert (grid <= 10 / found.coverage).all()
        fixed = sum(
            dy == 0 and (14 - col + dx if flip else col + dx) == col
            for (dy, dx), flip in zip(offsets.tolist(), flips.tolist(), strict=True)
        )
        assert float(grid[row, col]) == pytest.approx(fixed / int(found.coverage[row, col]))


def test_one_view_is_the_raw_feature_to_the_bit() -> None:
    backbone = regista.load("tiny")
    images = random_images(2, 4, 5, 14)
    raw = backbone(images).patches.detach()
    assert torch.equal(denoise(backbone, images, num_views=1), raw)
    still = (torch.zeros(7, 2, dtype=torch.long), torch.zeros(7, dtype=torch.bool))
    assert_close(denoise(backbone, images, views=still), raw)
    assert_close(denoise(backbone, images, shift_ratio=0, views=None, num_views=1), raw)


def test_linear_and_whatever_the_order() -> None:
    images = random_images(2, 8, 8)
    offsets, flips = sample_views((8, 8), 8, 0.3, seeded())
    plain = denoise(StubBackbone(position_dependent), images, views=(offsets, flips))
    scaled = StubBackbone(lambda pixels, grid: 3 * position_dependent(pixels, grid) - 2)
    assert_close(denoise(scaled, images, views=(offsets, flips)), 3 * plain - 2)
    order = torch.tensor([0, 5, 3, 7, 1, 2, 6, 4])
    assert_close(denoise(StubBackbone(position_dependent), images, views=(offsets[order], flips[order])), plain)


def test_a_view_that_comes_twice_is_counted_and_not_computed() -> None:
    offsets = torch.tensor([[0, 0], [1, 2], [0, 0], [1, 2], [0, 0], [0, 0]])
    flips = torch.tensor([False, True, False, True, True, False])
    images = random_images(1, 6, 6)
    backbone = StubBackbone(position_dependent)
    _, wanted = raw_views(backbone, images, (offsets, flips), WHITE)
    backbone.seen.clear()
    found = denoise_with_statistics(backbone, images, views=(offsets, flips))
    assert len(backbone.seen) == 3
    assert_close(found.patches, wanted.flatten(1, 2))
    assert int(found.coverage.max()) == 6


@pytest.mark.parametrize("together", [2, 3, 10, 50])
def test_views_in_one_forward_pass_change_nothing(together: int) -> None:
    backbone = tiny_vit(num_register_tokens=2)
    images = random_images(2, 4, 6, 14)
    wanted = denoise(backbone, images, generator=seeded())
    assert_close(denoise(backbone, images, generator=seeded(), views_per_forward=together), wanted)
    stub = StubBackbone(position_dependent)
    denoise(stub, random_images(2, 8, 8), shift_ratio=0.4, generator=seeded(), views_per_forward=together)
    assert len(stub.seen[0]) == 2 * min(together, 10)


def test_three_at_once_are_three_of_one() -> None:
    backbone = regista.load("tiny")
    images = random_images(3, 5, 4, 14)
    together = denoise_with_statistics(backbone, images, generator=seeded(8))
    assert together.shrinkage is not None
    for index in range(3):
        alone = denoise_with_statistics(backbone, images[index : index + 1], generator=seeded(8))
        assert alone.shrinkage is not None
        assert_close(together.patches[index], alone.patches[0])
        assert_close(together.shrinkage[index], alone.shrinkage[0])


@pytest.mark.parametrize("together", [1, 4])
def test_views_for_each_image(together: int) -> None:
    backbone = StubBackbone(position_dependent)
    images = random_images(3, 6, 8)
    drawn = [sample_views((6, 8), 5, 0.3, seeded(seed)) for seed in range(3)]
    views = (torch.stack([offsets for offsets, _ in drawn]), torch.stack([flips for _, flips in drawn]))
    found = denoise_with_statistics(backbone, images, views=views, views_per_forward=together)
    assert found.shrinkage is not None
    for index, own in enumerate(drawn):
        alone = denoise_with_statistics(backbone, images[index : index + 1], views=own)
        assert alone.shrinkage is not None
        assert_close(found.patches[index], alone.patches[0])
        assert torch.equal(found.coverage[index], alone.coverage)
        assert_close(found.shrinkage[index], alone.shrinkage[0])


def test_shrinkage_needs_the_identity() -> None:
    views = (torch.tensor([[0, 0], [1, 0]]), torch.tensor([True, False]))
    found = denoise_with_statistics(StubBackbone(patch_statistics), random_images(1, 5, 5), views=views)
    assert found.shrinkage is None
    both = (torch.stack([views[0]] * 2), torch.stack([views[1], torch.tensor([False, True])]))
    found = denoise_with_statistics(StubBackbone(patch_statistics), random_images(2, 5, 5), views=both)
    assert found.shrinkage is None


def test_another_read_out() -> None:
    projection = torch.randn(6, 3, generator=seeded())

    def project(backbone: Backbone, images: Tensor) -> Tensor:
        return backbone(images).patches @ projection

    images = random_images(2, 8, 8)
    backbone = StubBackbone(position_dependent)
    plain = denoise(backbone, images, generator=seeded())
    assert_close(denoise(backbone, images, generator=seeded(), features=project), plain @ projection)


@pytest.mark.parametrize(("dtype", "wanted"), [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
])  # fmt: skip
def test_sums_are_at_least_float32(dtype: torch.dtype, wanted: torch.dtype) -> None:
    images = random_images(1, 5, 5, 14)
    exact = denoise(tiny_vit(), images, generator=seeded())
    found = denoise(tiny_vit().to(dtype=dtype), images, generator=seeded())
    assert found.dtype == wanted
    assert (found.float() - exact).norm() < (0.05 if dtype == torch.bfloat16 else 1e-4) * exact.norm()


def test_the_module_and_gradients_are_left_alone() -> None:
    backbone = tiny_vit()
    before = {name: value.clone() for name, value in backbone.module.state_dict().items()}
    denoise(backbone, random_images(1, 4, 4, 14).requires_grad_(), generator=seeded())
    assert all(torch.equal(value, before[name]) for name, value in backbone.module.state_dict().items())
    assert all(parameter.grad is None for parameter in backbone.module.parameters())


def one_view(offset: Any, flip: Any = False) -> tuple[Any, Any]:
    return [[0, 0], offset], [False, flip]


@pytest.mark.parametrize(("views", "message"), [
    (one_view([4, 0]), r"\[4, 0\].*sees nothing.*4 rows x 6 cols"),
    (one_view([0, -6]), "sees nothing"),
    (([[1, 0]], [False]), "6 of 24 cells are seen by no view"),
    (([[0, 0, 0]], [False]), "offsets are whole numbers"),
    (([0, 0], [False]), "offsets are whole numbers"),
    (([[0.5, 0]], [False]), "offsets are whole numbers.*float32"),
    ((torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.bool)), "offsets are whole numbers"),
    ((torch.zeros(3, 2, 2, dtype=torch.long), torch.zeros(3, 2, dtype=torch.bool)), r"\(2, V, 2\)"),
    (([[0, 0], [1, 0]], [False]), "flips are bool"),
    (([[0, 0]], [0]), "flips are bool"),
])  # fmt: skip
def test_views_that_do_not_fit(views: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        denoise(StubBackbone(patch_statistics), random_images(2, 4, 6), views=views)


def test_lists_do_as_views() -> None:
    images = random_images(1, 4, 6)
    views = one_view([1, -2], True)
    tensors = tuple(torch.tensor(part) for part in views)
    backbone = StubBackbone(position_dependent)
    assert torch.equal(denoise(backbone, images, views=views), denoise(backbone, images, views=tensors))


@pytest.mark.parametrize("place", [(0, 0), (31, 31), (0, 31), (15, 16)])
def test_nan_pixels_are_an_error(place: tuple[int, int]) -> None:
    images = random_images(2, 8, 8)
    images[1, 2, place[0], place[1]] = float("nan")
    for seed in range(3):
        with pytest.raises(ValueError, match="NaN or infinite"):
            denoise(StubBackbone(patch_statistics), images, generator=seeded(seed))


@pytest.mark.parametrize(("images", "message"), [
    (torch.zeros(3, 32, 32), r"\(B, 3, H, W\)"),
    (torch.zeros(0, 3, 32, 32), "at least 1"),
    (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "preprocessed"),
    (torch.zeros(1, 3, 32, 30), "not divisible"),
    ("a.png", "got str"),
])  # fmt: skip
def test_images_that_do_not_fit(images: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        denoise(StubBackbone(patch_statistics), images)


def test_read_outs_that_do_not_fit() -> None:
    backbone, images = StubBackbone(patch_statistics), random_images(2, 8, 8)
    wrong: list[Any] = [lambda b, x: b(x).tokens, lambda b, x: b(x).patches[0], lambda b, x: None]
    for readout in wrong:
        with pytest.raises(ValueError, match=r"read-out gives float patch features|\(B, P, D\) wanted"):
            denoise(backbone, images, features=readout)
    with pytest.raises(ValueError, match="NaN or infinite features"):
        denoise(backbone, images, features=lambda b, x: b(x).patches / 0)
    with pytest.raises(ValueError, match="views_per_forward"):
        denoise(backbone, images, views_per_forward=0)
