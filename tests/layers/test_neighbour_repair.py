"""Neighbour averages against a loop over cells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regista.layers.neighbour_repair import KERNELS, Kernel, neighbour_average, window_average


def random_map(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_mask(*shape: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def slow_average(tokens: Tensor, mask: Tensor, kernel: str) -> Tensor:
    """One image (rows, cols, D), ring by ring, in float64."""
    rows, cols = mask.shape
    tokens, waiting = tokens.double().clone(), mask.clone()
    while waiting.any() and not waiting.all():
        before, known = tokens.clone(), ~waiting
        for row in range(rows):
            for col in range(cols):
                if known[row, col]:
                    continue
                total, weight = torch.zeros(tokens.shape[-1]).double(), 0.0
                for place, (down, right) in enumerate((d, r) for d in (-1, 0, 1) for r in (-1, 0, 1)):
                    y, x = row + down, col + right
                    if 0 <= y < rows and 0 <= x < cols and known[y, x]:
                        total += KERNELS[kernel][place] * before[y, x]
                        weight += KERNELS[kernel][place]
                if weight:
                    tokens[row, col] = total / weight
                    waiting[row, col] = False
    return tokens


@pytest.mark.parametrize("kernel", ["uniform", "gaussian"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
@pytest.mark.parametrize("grid", [(6, 9), (1, 7), (5, 2)])
def test_equals_a_slow_loop(kernel: Kernel, share: float, grid: tuple[int, int]) -> None:
    tokens, mask = random_map(3, *grid, 4), random_mask(3, *grid, share=share)
    repaired = neighbour_average(tokens, mask, kernel=kernel)
    for image in range(3):
        wanted = slow_average(tokens[image], mask[image], kernel)
        torch.testing.assert_close(repaired[image].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(repaired[~mask], tokens[~mask])


def test_a_single_cell_by_hand() -> None:
    tokens = torch.arange(9.0).reshape(1, 3, 3, 1)
    mask = torch.zeros(1, 3, 3, dtype=torch.bool)
    mask[0, 0, 1] = True
    tokens[0, 0, 1] = 1e6
    assert float(neighbour_average(tokens, mask)[0, 0, 1]) == pytest.approx((0 + 2 + 3 + 4 + 5) / 5)
    gaussian = neighbour_average(tokens, mask, kernel="gaussian")
    assert float(gaussian[0, 0, 1]) == pytest.approx((2 * 0 + 2 * 2 + 3 + 2 * 4 + 5) / 8)


def test_window_in_reading_order() -> None:
    tokens = torch.arange(9.0).reshape(1, 3, 3, 1)
    mask = torch.zeros(1, 3, 3, dtype=torch.bool)
    mask[0, 1, 1] = mask[0, 2, 2] = True
    weights = torch.ones(1, 3, 3)
    weights[0, 0, 1] = 3
    repaired, left = window_average(tokens, mask, weights, (0, 1, 1, 0, 0, 0, 0, 0, 0))  # above, and above to the right
    assert float(repaired[0, 1, 1]) == pytest.approx((3 * 1 + 2) / 4)
    assert float(repaired[0, 2, 2]) == 5  # nothing to the right of it
    assert not left.any()
    unchanged, left = window_average(tokens, mask, torch.zeros_like(weights), (1,) * 9)
    assert torch.equal(unchanged, tokens)
    assert torch.equal(left, mask)


def test_cluster_fills_from_its_rim() -> None:
    tokens = torch.ones(1, 9, 9, 2)
    mask = torch.zeros(1, 9, 9, dtype=torch.bool)
    mask[:, 1:8, 1:8] = True
    tokens[mask] = 100
    assert torch.equal(neighbour_average(tokens, mask), torch.ones(1, 9, 9, 2))


def test_wholly_masked_image_is_unchanged() -> None:
    tokens = random_map(2, 4, 5, 3)
    mask = random_mask(2, 4, 5, share=0.3)
    mask[0] = True
    repaired = neighbour_average(tokens, mask)
    assert torch.equal(repaired[0], tokens[0])
    assert not torch.equal(repaired[1], tokens[1])
    assert torch.equal(neighbour_average(tokens, torch.zeros_like(mask)), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    tokens, mask = random_map(2, 6, 6, 3).to(dtype), random_mask(2, 6, 6, share=0.4)
    wide = tokens if dtype == torch.float64 else tokens.float()
    repaired = neighbour_average(tokens, mask)
    assert repaired.dtype == dtype
    assert torch.equal(repaired, neighbour_average(wide, mask).to(dtype))


def test_leaves_its_inputs_alone_and_lets_gradients_through() -> None:
    tokens, mask = random_map(1, 4, 4, 2).requires_grad_(), random_mask(1, 4, 4, share=0.3)
    kept, kept_mask = tokens.detach().clone(), mask.clone()
    neighbour_average(tokens, mask).sum().backward()
    assert torch.equal(tokens.detach(), kept)
    assert torch.equal(mask, kept_mask)
    assert tokens.grad is not None
    assert bool((tokens.grad[mask] == 0).all())
    assert float(tokens.grad.sum()) == pytest.approx(32)  # each result is a mean of unmasked cells


def test_mistakes_are_named() -> None:
    tokens, mask = random_map(2, 4, 4, 2), random_mask(2, 4, 4, share=0.3)
    with pytest.raises(ValueError, match=r"\(B, rows, cols, D\)"):
        neighbour_average(tokens[0], mask)
    with pytest.raises(ValueError, match="mask must be a bool"):
        neighbour_average(tokens, mask.float())
    with pytest.raises(ValueError, match="mask must be a bool"):
        neighbour_average(tokens, mask[:1])
    with pytest.raises(ValueError, match="kernel must be one of"):
        neighbour_average(tokens, mask, kernel="box")  # type: ignore[arg-type]
    tokens[1, 2, 2, 0] = float("nan")
    with pytest.raises(ValueError, match=r"images \[1\]"):
        neighbour_average(tokens, mask)
