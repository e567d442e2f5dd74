from __future__ import annotations

import numpy as np
import pytest
import torch

from regista.diagnosis import find_outliers
from regista.diagnosis.findings import high_norm
from tests.diagnosis.norm_maps import healthy, sick


@pytest.mark.parametrize("seed", [0, 1])
def test_healthy_maps_are_clean(seed: int) -> None:
    flagged = {name: find_outliers(torch.from_numpy(maps)).share for name, maps in healthy(seed)}
    assert not {name: share for name, share in flagged.items() if share}


def test_sick_maps_are_found_whole() -> None:
    wrong = {}
    for name, maps, truth in sick(0):
        cutoff, mask, share, *_ = find_outliers(torch.from_numpy(maps))
        hit = (mask.numpy() & truth).sum()
        precision, recall = hit / max(1, mask.sum().item()), hit / truth.sum()
        if cutoff is None or precision < 0.95 or recall < 0.95 or share != pytest.approx(mask.double().mean().item()):
            wrong[name] = (precision, recall)
    assert not wrong


def test_five_maps_that_fool_a_percentile_or_a_two_means_rule() -> None:
    rng = np.random.default_rng(0)
    constant = np.full((1, 16, 16), 7.0)
    stripe = np.full((1, 16, 16), 40.0)
    stripe[:, 7] = 52.0
    many = 40 + 2 * rng.standard_normal((1, 16, 16))
    truth = rng.random((1, 16, 16)) < 0.13
    many[truth] *= 5
    normal = 40 + 4 * rng.standard_normal((1, 16, 16))
    for clean in (constant, stripe, normal):
        assert find_outliers(torch.from_numpy(clean)).cutoff is None
    found = find_outliers(torch.from_numpy(many))
    assert np.array_equal(found.mask.numpy(), truth)
    assert "more than a tenth" in found.note
    broken = torch.from_numpy(normal).repeat(3, 1, 1)
    broken[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match="image 2"):
        find_outliers(broken)


@pytest.fixture
def maps() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    norms = 40 * torch.exp(0.08 * torch.randn(6, 20, 15, generator=rng, dtype=torch.float64))
    truth = torch.rand(6, 20, 15, generator=rng) < 0.03
    norms[truth] *= 4
    return norms, truth


def test_cutoff_separates_the_mask(maps: tuple[torch.Tensor, torch.Tensor]) -> None:
    norms, truth = maps
    found = find_outliers(norms)
    assert found.cutoff is not None
    assert torch.equal(norms > found.cutoff, truth)
    assert torch.equal(found.mask, truth)
    own = norms / norms.flatten(1).quantile(0.5, dim=1)[:, None, None]
    assert found.ratio == pytest.approx(np.median(own[truth]) / np.median(own[~truth]))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 5e3])
def test_scale_and_order_of_images_do_not_matter(maps: tuple[torch.Tensor, torch.Tensor], scale: float) -> None:
    norms, truth = maps
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(find_outliers((scale * norms)[order]).mask, truth[order])
    assert torch.equal(find_outliers((scale * norms).float()).mask, truth)


def test_each_image_is_measured_in_its_own_median(maps: tuple[torch.Tensor, torch.Tensor]) -> None:
    norms, truth = maps
    scales = torch.logspace(0, 2, 6, dtype=torch.float64).view(6, 1, 1)
    assert torch.equal(find_outliers(norms * scales).mask, truth)


def test_padded_cells_are_left_out(maps: tuple[torch.Tensor, torch.Tensor]) -> None:
    norms, truth = maps
    valid = torch.ones_like(truth)
    valid[:, :, 12:] = False
    norms = torch.where(valid, norms, norms * 9)
    found = find_outliers(norms, valid=valid)
    assert torch.equal(found.mask, truth & valid)
    assert found.share == pytest.approx((truth & valid).sum().item() / valid.sum().item())


def test_a_given_cutoff_is_obeyed_and_the_share_falls_with_it(maps: tuple[torch.Tensor, torch.Tensor]) -> None:
    norms, _ = maps
    shares = [find_outliers(norms, cutoff=cutoff).share for cutoff in (30.0, 40.0, 50.0, 100.0, 1e6)]
    assert shares == sorted(shares, reverse=True)
    assert torch.equal(find_outliers(norms, cutoff=50.0).mask, norms > 50)


def test_shapes_and_signs_are_checked() -> None:
    with pytest.raises(ValueError, match="rows, cols"):
        find_outliers(torch.ones(4, 4))
    with pytest.raises(ValueError, match="negative"):
        find_outliers(-torch.ones(1, 4, 4))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (2, 2, 2)])
def test_tiny_grids_are_clean_and_do_not_fail(shape: tuple[int, int, int]) -> None:
    assert not find_outliers(torch.rand(shape) + 1).mask.any()
    assert not find_outliers(torch.zeros(shape)).mask.any()


@pytest.mark.parametrize(("times", "alone", "of_twelve"), [(1.58, True, False), (3.0, True, True)])
def test_one_map_of_many_must_give_more_evidence(times: float, alone: bool, of_twelve: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    norms = 40 * torch.exp(0.08 * torch.randn(10, 12, 16, 16, generator=rng, dtype=torch.float64))
    for row, col in ((4, 5), (10, 2)):
        norms[3, 7, row, col] = times * norms[3, 7].median()
    assert bool(find_outliers(norms[:, 7]).mask.any()) is alone
    found = high_norm(norms, torch.ones(10, 16, 16, dtype=torch.bool), None, None)
    assert found.found is of_twelve
    assert found.block == (7 if of_twelve else None)
