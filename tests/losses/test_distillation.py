"""The distillation loss against loops, closed forms and its own symmetries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regista.losses.distillation import distillation_loss
from tests.tolerances import assert_close


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def slow_loss(p: Tensor, t: Tensor, scale: float, valid: Tensor | None = None) -> tuple[float, float, float]:
    """Token by token, in Python's own numbers."""
    cosines, squares = [], []
    for image in range(p.shape[0]):
        for patch in range(p.shape[1]):
            if valid is not None and not bool(valid[image][patch]):
                continue
            a, b = p[image][patch].tolist(), t[image][patch].tolist()
            length_a, length_b = math.sqrt(sum(x * x for x in a)) + 1e-8, math.sqrt(sum(x * x for x in b)) + 1e-8
            cosines.append(sum(x / length_a * y / length_b for x, y in zip(a, b, strict=True)))
            squares += [(x - y) ** 2 for x, y in zip(a, b, strict=True)]
    cosine, mse = 1 - sum(cosines) / len(cosines), sum(squares) / len(squares)
    return cosine + scale * mse, cosine, mse


@pytest.mark.parametrize("scale", [0.0, 0.2, 1.0])
def test_equals_a_loop(scale: float) -> None:
    p, t = pair(3, 5, 7)
    assert_close(torch.stack(distillation_loss(p, t, mse_scale=scale)), torch.tensor(slow_loss(p, t, scale)))


def test_only_valid_patches_count() -> None:
    p, t = pair(2, 6, 4)
    valid = torch.rand(2, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    assert 0 < valid.sum() < valid.numel()
    got = torch.stack(distillation_loss(p, t, valid=valid))
    assert_close(got, torch.tensor(slow_loss(p, t, 1.0, valid)))
    p[~valid] = 1e6
    assert_close(torch.stack(distillation_loss(p, t, valid=valid)), got)
    everything = torch.ones(2, 6, dtype=torch.bool)
    assert_close(distillation_loss(p, t, valid=everything).loss, distillation_loss(p, t).loss)


def test_same_and_opposite() -> None:
    _, t = pair(2, 9, 16)
    assert distillation_loss(t, t).loss.abs() <= 1e-6
    assert_close(distillation_loss(-t, t).loss, 2 + 4 * t.square().mean())


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_scaling_moves_only_the_squares(factor: float) -> None:
    _, t = pair(2, 9, 16)
    terms = distillation_loss(factor * t, t)
    assert terms.cosine.abs() <= 1e-6
    assert_close(terms.mse, (1 - factor) ** 2 * t.square().mean())
    p, _ = pair(2, 9, 16)
    assert_close(distillation_loss(factor * p, t).cosine, distillation_loss(p, t).cosine)


def test_gradient_goes_to_the_prediction_alone() -> None:
    p, t = (x.requires_grad_() for x in pair(2, 3, 4))
    distillation_loss(p, t).loss.backward()
    assert p.grad is not None
    assert p.grad.abs().sum() > 0
    assert t.grad is None
    # d mse / dp in closed form
    p.grad = None
    distillation_loss(p, t).mse.backward()
    assert_close(p.grad, 2 * (p - t).detach() / p.numel())


def test_computed_in_float32_under_autocast() -> None:
    p, t = pair(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        terms = distillation_loss(p.bfloat16(), t)
    assert terms.loss.dtype == torch.float32
    assert_close(terms.loss, distillation_loss(p.bfloat16().float(), t).loss)


def test_zero_tokens_give_numbers() -> None:
    p = torch.zeros(1, 2, 4, requires_grad=True)
    terms = distillation_loss(p, torch.ones(1, 2, 4))
    assert terms.cosine == 1
    assert terms.mse == 1
    terms.loss.backward()
    assert p.grad is not None
    assert torch.isfinite(p.grad).all()


@pytest.mark.parametrize(
    ("p", "t", "options", "words"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 4, 4), {}, r"\(2, 3, 4\) and \(2, 4, 4\)"),
        (torch.ones(3, 4), torch.ones(3, 4), {}, "B, P, D"),
        (torch.ones(0, 3, 4), torch.ones(0, 3, 4), {}, "B, P, D"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), {"mse_scale": -1.0}, "mse_scale"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), {"mse_scale": math.nan}, "mse_scale"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), {"valid": torch.ones(2, 3)}, "bool"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), {"valid": torch.ones(3, 2, dtype=torch.bool)}, "bool"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), {"valid": torch.zeros(2, 3, dtype=torch.bool)}, "no True"),
    ],
)
def test_mistakes_are_named(p: Tensor, t: Tensor, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        distillation_loss(p, t, **options)  # type: ignore[arg-type]
