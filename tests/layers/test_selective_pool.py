"""Selective pooling against a slow loop over the released description, and its numeric properties."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from regista.layers.channel_filter import low_pass
from regista.layers.selective_pool import SelectivePool, Variant, patch_scores, stability_scores
from tests.layers.shipped_pool import slow_pool, slow_scores

VARIANTS: tuple[Variant, ...] = get_args(Variant)


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("width", [24, 25])
@pytest.mark.parametrize("k", [1, 4, 11])
def test_equals_a_slow_loop(variant: Variant, width: int, k: int) -> None:
    x = tokens(2, 12, width, dtype=torch.float64)
    wanted, wanted_votes = slow_pool(x, k, variant, 1e-6)
    pooled, votes = SelectivePool(k, variant).pool_with_votes(x)
    torch.testing.assert_close(pooled, wanted, rtol=0, atol=1e-14)
    assert torch.equal(votes, wanted_votes)
    assert torch.equal(SelectivePool(k, variant)(x), pooled)
    torch.testing.assert_close(stability_scores(x, variant), slow_scores(x, variant, 1e-6), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [20, 1.0])
def test_all_patches_give_the_mean(k: int | float) -> None:
    x = tokens(3, 20, 48)
    pooled, votes = SelectivePool(k).pool_with_votes(x)
    assert torch.equal(pooled, x.mean(1))
    assert torch.equal(votes, torch.full((3, 20), 48))


@pytest.mark.parametrize("k", [1, 5])
def test_order_of_patches_does_not_matter(k: int) -> None:
    x = tokens(2, 30, 48, dtype=torch.float64)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    pooled, votes = SelectivePool(k).pool_with_votes(x)
    moved, moved_votes = SelectivePool(k).pool_with_votes(x[:, order])
    torch.testing.assert_close(moved, pooled, rtol=0, atol=0 if k == 1 else 1e-15)
    assert torch.equal(moved_votes, votes[:, order])


def test_rolled_channels_roll_the_result() -> None:
    x = tokens(2, 30, 48, dtype=torch.float64)
    pooled, votes = SelectivePool(3).pool_with_votes(x)
    rolled, rolled_votes = SelectivePool(3).pool_with_votes(x.roll(7, -1))
    torch.testing.assert_close(rolled, pooled.roll(7, -1), rtol=0, atol=1e-15)
    assert torch.equal(rolled_votes, votes)


def test_permuted_channels_pick_other_patches() -> None:
    x = tokens(1, 196, 768)
    order = torch.randperm(768, generator=torch.Generator().manual_seed(1))
    unmoved = SelectivePool(1)(x)[:, order] == SelectivePool(1)(x[..., order])
    assert float(unmoved.float().mean()) < 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_scale_and_sign(variant: Variant) -> None:
    x = tokens(2, 30, 48)
    pool = SelectivePool(3, variant, eps=1e-12)
    torch.testing.assert_close(pool(x * 8), pool(x) * 8, rtol=5e-7, atol=0)
    assert float((pool(-x) + pool(x)).abs().mean()) > 0.1  # no odd function: positive values win
    assert bool((SelectivePool(1, variant)(x) > 0).all())


@pytest.mark.parametrize("k", [1, 6, 0.25, 30])
def test_votes_add_up(k: int | float) -> None:
    x = tokens(3, 30, 48)
    votes = SelectivePool(k).votes(x)
    count = k if isinstance(k, int) else 8  # a quarter of 30, rounded to even
    assert votes.dtype == torch.int64
    assert votes.shape == (3, 30)
    assert votes.sum(1).tolist() == [count * 48] * 3
    assert int(votes.min()) >= 0
    assert int(votes.max()) <= 48


@pytest.mark.parametrize(("dtype", "wanted", "tolerance"), [(torch.float64, 1536.50, 0.01), (torch.float32, 1536.5, 2)])
def test_score_of_a_constant_token(dtype: torch.dtype, wanted: float, tolerance: float) -> None:
    x = torch.ones(1, 1, 768, dtype=dtype)
    assert float(stability_scores(x, "released", 0.0).mean()) == pytest.approx(wanted, abs=tolerance)
    assert float(stability_scores(x, "paper", 0.0).mean()) == pytest.approx(wanted - 1, abs=tolerance)


def test_variants_differ_by_a_sign() -> None:
    x = tokens(2, 30, 48, dtype=torch.float64)
    difference = stability_scores(x, "paper", 0.0) - stability_scores(x, "released", 0.0)
    torch.testing.assert_close(difference, torch.sign(low_pass(x) - x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_token_is_finite_and_loses(variant: Variant) -> None:
    x = tokens(2, 30, 48)
    x[:, 4] = 0
    assert bool(stability_scores(x, variant).isfinite().all())
    assert SelectivePool(1, variant).votes(x)[:, 4].tolist() == [0, 0]
    with pytest.raises(ValueError, match="eps > 0"):
        SelectivePool(1, variant, eps=0.0)(x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_negative_channel_takes_the_score_nearest_zero(variant: Variant) -> None:
    x = -tokens(1, 30, 48).abs() - 0.5
    scores = stability_scores(x, variant)
    assert bool((scores < 0).all())
    chosen = scores.abs().argmin(1, keepdim=True)
    assert torch.equal(SelectivePool(1, variant)(x), x.gather(1, chosen).squeeze(1))


def test_gradient_flows_through_picked_values_alone() -> None:
    x = tokens(2, 25, 48).requires_grad_()
    SelectivePool(1)(x).sum().backward()
    assert x.grad is not None
    assert int((x.grad != 0).sum()) * 25 == x.numel()
    assert x.grad.sum((1, 2)).tolist() == [48.0, 48.0]
    assert set(x.grad.unique().tolist()) == {0.0, 1.0}
    assert not stability_scores(x).requires_grad
    x.grad = None
    SelectivePool(4)(x).sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0.0, 0.25}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_half_precision_works_in_float32(dtype: torch.dtype, k: int) -> None:
    x = tokens(2, 20, 48, dtype=dtype)
    pooled = SelectivePool(k)(x)
    assert pooled.dtype == dtype
    assert torch.equal(pooled, SelectivePool(k)(x.float()).to(dtype))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_first_of_equal_patches_is_picked(k: int) -> None:
    x = torch.ones(2, 20, 16) * torch.linspace(1, 2, 16)
    votes = SelectivePool(k).votes(x)
    assert votes.tolist() == [[16] * k + [0] * (20 - k)] * 2


def test_equal_patches_at_the_bar() -> None:
    x = tokens(1, 6, 32).repeat(1, 2, 1)  # each patch twice
    assert int(SelectivePool(1).votes(x).split(6, 1)[1].sum()) == 0
    pooled, votes = SelectivePool(3).pool_with_votes(x)
    early, late = votes.split(6, 1)
    assert int((early - late).sum()) == 32  # the odd pick of every channel goes to the earlier one
    assert torch.equal(pooled, SelectivePool(3)(x))


@pytest.mark.parametrize("k", [1, 4, 0.5, 1.0])
def test_padded_cells_are_never_picked(k: int | float) -> None:
    x = tokens(2, 12, 32)
    spread = torch.full((2, 20, 32), 1e4)
    valid = torch.zeros(2, 20, dtype=torch.bool)
    for image in range(2):
        cells = torch.randperm(20, generator=torch.Generator().manual_seed(image))[:12].sort().values
        spread[image, cells] = x[image]
        valid[image, cells] = True
    spread[~valid] = float("nan")
    pooled, votes = SelectivePool(k).pool_with_votes(spread, valid)
    wanted, wanted_votes = SelectivePool(k).pool_with_votes(x)
    torch.testing.assert_close(pooled, wanted)
    assert torch.equal(votes[valid], wanted_votes.flatten())
    assert int(votes[~valid].sum()) == 0
    assert torch.equal(SelectivePool(k)(spread, valid), pooled)


def test_share_counts_the_valid_patches_of_each_image() -> None:
    x = tokens(2, 20, 32)
    valid = torch.arange(20) < torch.tensor([[10], [20]])
    assert SelectivePool(0.5).votes(x, valid).sum(1).tolist() == [5 * 32, 10 * 32]


@pytest.mark.parametrize("k", [1, 5])
def test_batch_of_three_equals_three_of_one(k: int) -> None:
    x = tokens(3, 30, 96)
    torch.testing.assert_close(SelectivePool(k)(x), torch.cat([SelectivePool(k)(one) for one in x.split(1)]))


@pytest.mark.parametrize("k", [0, -1, 0.0, 1.5, True, "3", None])
def test_k_out_of_range(k: Any) -> None:
    with pytest.raises(ValueError, match="k must be"):
        SelectivePool(k)


def test_other_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="variant must be one of"):
        SelectivePool(1, "other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps must be"):
        SelectivePool(1, eps=-1e-6)
    with pytest.raises(ValueError, match="31 of 30 patches"):
        SelectivePool(31)(tokens(1, 30, 8))


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_an_error(k: int, bad: float) -> None:
    x = tokens(3, 20, 32)
    x[1, 7, 5] = bad
    with pytest.raises(ValueError, match=r"images \[1\]"):
        SelectivePool(k)(x)
    with pytest.raises(ValueError, match=r"images \[1\]"):
        patch_scores(x, torch.ones(3, 32))


def test_wrong_shapes() -> None:
    for wrong in (torch.ones(4, 8), torch.ones(1, 0, 8), torch.ones(1, 4, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match="float tensor"):
            SelectivePool(1)(wrong)
    for valid in (torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 4)):
        with pytest.raises(ValueError, match="valid must be a bool tensor"):
            SelectivePool(1)(torch.ones(1, 4, 8), valid)
    with pytest.raises(ValueError, match=r"images \[0\] have no valid patch"):
        SelectivePool(1)(torch.ones(1, 4, 8), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="pooled must be"):
        patch_scores(torch.ones(2, 4, 8), torch.ones(2, 4))


def test_patch_scores_are_cosines() -> None:
    x, pooled = tokens(2, 9, 16), tokens(2, 16, seed=1)
    scores = patch_scores(x, pooled)
    for image in range(2):
        for patch in range(9):
            wanted = torch.nn.functional.cosine_similarity(x[image, patch], pooled[image], dim=0)
            torch.testing.assert_close(scores[image, patch], wanted)


def test_patch_scores_stay_in_range() -> None:
    x = tokens(1, 6, 16) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0]).reshape(1, 6, 1)
    for pooled in (x.split(1, 1)[2].squeeze(1), -x.split(1, 1)[4].squeeze(1)):
        scores = patch_scores(x, pooled)
        assert float(scores.abs().max()) <= 1
        assert float(scores[0, 5]) == 0
    assert patch_scores(x, torch.zeros(1, 16)).tolist() == [[0.0] * 6]
    assert patch_scores(x.half().clamp(-1e4, 1e4), pooled.half().clamp(-1e4, 1e4)).dtype == torch.float32


@pytest.mark.parametrize("k", [1, 3, 9])
def test_can_be_exported(k: int) -> None:
    x = tokens(2, 9, 16)
    pool = SelectivePool(k)
    assert torch.equal(torch.export.export(pool, (x,)).module()(x), pool(x))
