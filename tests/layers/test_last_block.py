"""Last-block variants against naive attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regista.layers.last_block import last_block_attention, neighbourhood
from regista.tokens import TokenLayout
from tests.tolerances import assert_close

LAYOUTS = [
    TokenLayout.of((3, 4), 14),
    TokenLayout.of((2, 5), 14, num_register_tokens=3),
    TokenLayout.of((4, 3), 14, num_cls_tokens=0),
]


def naive(logits: Tensor, v: Tensor) -> Tensor:
    """One softmax a row, by hand."""
    out = torch.zeros_like(v)
    for b in range(v.shape[0]):
        for h in range(v.shape[1]):
            for i in range(v.shape[2]):
                weights = [math.exp(float(value)) for value in logits[b, h, i]]
                for j, weight in enumerate(weights):
                    out[b, h, i] += weight / sum(weights) * v[b, h, j]
    return out


def qkv(layout: TokenLayout) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, layout.num_tokens, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_against_naive_attention(layout: TokenLayout) -> None:
    q, k, v = qkv(layout)
    qq, kk, qk = (a @ b.transpose(-1, -2) / 2 for a, b in ((q, q), (k, k), (q, k)))
    near = neighbourhood(layout).double()
    wanted = {
        "vanilla": naive(qk, v),
        "maskclip": v,
        "sclip": naive(qq, v) + naive(kk, v),
        "naclip": naive(kk + near, v),
        "clearclip": naive(qq, v),
    }
    for variant, value in wanted.items():
        assert_close(last_block_attention(q, k, v, layout, variant), value)  # type: ignore[arg-type]


def test_rows_of_sclip_sum_to_two() -> None:
    q, k, _ = qkv(LAYOUTS[0])
    ones = torch.ones_like(q)
    assert_close(last_block_attention(q, k, ones, LAYOUTS[0], "sclip"), 2 * ones)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("std", [1.0, 5.0])
def test_neighbourhood(layout: TokenLayout, std: float) -> None:
    found = neighbourhood(layout, std)
    rows, cols = layout.grid_size
    patches = layout.attention_block(found, "patches", "patches")
    for first in range(rows * cols):
        for second in range(rows * cols):
            dy, dx = first // cols - second // cols, first % cols - second % cols
            wanted = math.exp(-(dy * dy + dx * dx) / (2 * std * std))
            assert float(patches[first, second]) == pytest.approx(wanted, abs=2e-7)
    assert float(found.sum()) == pytest.approx(float(patches.sum()), rel=1e-6)  # 0 for all other tokens
    assert patches.diagonal().eq(1).all()


def test_mistakes() -> None:
    q, k, v = qkv(LAYOUTS[0])
    with pytest.raises(ValueError, match=r"one of vanilla.*got 'other'"):
        last_block_attention(q, k, v, LAYOUTS[0], "other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="std is positive"):
        neighbourhood(LAYOUTS[0], 0.0)
