"""Slow and plain: what the things that are put into a model compute, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regista.tokens import TokenLayout


def moved(hidden: Tensor, layout: TokenLayout, units: Sequence[int], num_test_time: int, variant: str) -> Tensor:
    """Register neurons by a loop over images, units and tokens: (B, N, hidden) -> (B, N, hidden)."""
    out = hidden.clone()
    kinds = [name for name, count in layout.segments for _ in range(count)]
    last = max((token for token, kind in enumerate(kinds) if kind == "registers"), default=-1)
    receivers = range(last - num_test_time + 1, last + 1) if num_test_time else range(0)
    for image in range(len(hidden)):
        largest = {}
        for unit in units:
            found = 0.0
            for token in range(len(kinds)):
                value = float(hidden[image][token][unit])
                if abs(value) > abs(found):
                    found = value
            largest[unit] = found
        if variant == "released":
            shared = max(largest.values(), key=abs)
            largest = dict.fromkeys(units, shared)
        for unit in units:
            for token, kind in enumerate(kinds):
                if token in receivers:
                    out[image][token][unit] = largest[unit]
                elif variant == "paper" or kind != "cls":
                    out[image][token][unit] = 0.0
    return out


def constant_key(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with one more key, by hand.

    Args:
        q, k, v: (B, H, N, K).
        key, value: (H, K).

    Returns:
        The probabilities of the N keys (B, H, N, N), and the output (B, H, N, K).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(scale * torch.einsum("bhqk,bhnk->bhqn", q.double(), k.double()))
    more = torch.exp(scale * torch.einsum("bhqk,hk->bhq", q.double(), key.double()))
    total = weights.sum(-1) + more
    summed = torch.einsum("bhqn,bhnk->bhqk", weights, v.double()) + torch.einsum("bhq,hk->bhqk", more, value.double())
    return (weights / total.unsqueeze(-1)).to(q.dtype), (summed / total.unsqueeze(-1)).to(q.dtype)
