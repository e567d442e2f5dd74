"""Least-squares maps against matrices known in closed form and torch's own solver."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regista.layers.least_squares import least_squares_map


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_linear_function_gives_its_matrix() -> None:
    matrix, constant = weights(7, 12), weights(7, seed=1)
    found = least_squares_map(lambda x: x @ matrix.T + constant, 12, num_samples=50, dtype=torch.float64)
    torch.testing.assert_close(found, matrix, rtol=0, atol=1e-11)


def test_many_batches_give_the_matrix_too() -> None:
    matrix = weights(3, 4)
    found = least_squares_map(lambda x: x @ matrix.T.float() + 5, 4, num_samples=10_000)
    torch.testing.assert_close(found, matrix, rtol=0, atol=1e-6)


def test_equals_another_solver() -> None:
    seen = []

    def curved(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.stack([x.prod(1), x.exp().sum(1), x.amax(1)], 1)

    found = least_squares_map(curved, 5, num_samples=6000, dtype=torch.float64)
    inputs = torch.cat(seen)
    assert inputs.shape == (6000, 5)
    wanted = torch.linalg.lstsq(F.pad(inputs, (0, 1), value=1.0), curved(inputs)).solution
    torch.testing.assert_close(found, wanted[:5].T, rtol=0, atol=1e-10)


def test_gelu_mlp_has_a_closed_form() -> None:
    """By Stein's identity the best map is the mean Jacobian; that of GELU at b + s z is known."""
    first, second, bias = weights(40, 6) / 3, weights(6, 40, seed=1) / 6, weights(40, seed=2)
    found = least_squares_map(lambda x: F.gelu(x @ first.T + bias) @ second.T, 6, dtype=torch.float64)
    spread = first.norm(dim=1)
    lifted = torch.sqrt(1 + spread**2)
    # E[Phi(u)] + E[u phi(u)] for u = bias + spread * z
    density = torch.exp(-((bias / lifted) ** 2) / 2) / math.sqrt(2 * math.pi)
    slope = torch.special.ndtr(bias / lifted) + bias * density / lifted**3
    wanted = second @ (slope[:, None] * first)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def test_swiglu_mlp_equals_its_mean_jacobian() -> None:
    gate, value, last = weights(20, 4), weights(20, 4, seed=1), weights(4, 20, seed=2)

    def mlp(x: Tensor) -> Tensor:
        return (F.silu(x @ gate.T) * (x @ value.T)) @ last.T

    found = least_squares_map(mlp, 4, dtype=torch.float64)
    inputs = weights(60_000, 4, seed=9)
    pre = inputs @ gate.T
    slope = torch.sigmoid(pre) * (1 + pre * (1 - torch.sigmoid(pre))) * (inputs @ value.T)
    wanted = last @ (slope.mean(0)[:, None] * gate + F.silu(pre).mean(0)[:, None] * value)
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_same_seed_same_map() -> None:
    maps = [least_squares_map(F.gelu, 5, num_samples=500, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[0], maps[2])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="num_samples must exceed the width 8, got 8"):
        least_squares_map(F.gelu, 8, num_samples=8)
    with pytest.raises(ValueError, match="finite outputs"):
        least_squares_map(lambda x: x / 0, 3, num_samples=20)
    with pytest.raises(ValueError, match="finite outputs"):
        least_squares_map(lambda x: x.sum(1), 3, num_samples=20)
