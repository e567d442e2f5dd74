"""Distance between predicted and target patch features: direction and value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-8


class DistillationTerms(NamedTuple):
    """Scalars, float32.

    Attributes:
        loss: cosine + mse_scale * mse; the one to minimise.
        cosine: 1 - mean cosine, from 0 to 2.
        mse: Mean squared difference of all elements, not scaled.
    """

    loss: Tensor
    cosine: Tensor
    mse: Tensor


def distillation_loss(
    predicted: Tensor, target: Tensor, *, mse_scale: float = 1.0, valid: Tensor | None = None
) -> DistillationTerms:
    """1 - mean cosine over the tokens + mse_scale * mean squared difference over the elements.

    Both are computed in float32, also under autocast. No gradient goes to the target. Without
    ``valid`` this is the loss of PH-Reg (2505.21501, section 3.3, and its released code):
    cosine of t / (|t| + 1e-8) and p / (|p| + 1e-8), mean over all B * P tokens.

    Args:
        predicted: (B, P, D), with gradients.
        target: (B, P, D).
        mse_scale: Weight of the squared difference; PH-Reg's is 1.
        valid: bool (B, P), the patches that count; all by default.

    Raises:
        ValueError: for other or unequal shapes, an empty batch, a negative or infinite scale, a
            ``valid`` of another shape or type, or one without a single True.
    """
    if predicted.ndim != 3 or predicted.shape != target.shape or not predicted.numel():
        raise ValueError(
            f"predicted and target are (B, P, D) of one shape, got {tuple(predicted.shape)} and {tuple(target.shape)}; "
            "both must come from images of one size"
        )
    if not 0 <= mse_scale < float("inf"):
        raise ValueError(f"mse_scale is a number of 0 or more, got {mse_scale}")
    with torch.autocast(predicted.device.type, enabled=False):
        p = predicted.float()
        t = target.detach().to(p.device).float()
        cosines = token_cosines(p, t)  # (B, P)
        squares = (p - t).square().mean(-1)  # (B, P)
        if valid is None:
            cosine, mse = 1 - cosines.mean(), squares.mean()
        else:
            weights = _weights(valid, predicted).to(p.device)
            cosine, mse = 1 - (cosines * weights).sum(), (squares * weights).sum()
        return DistillationTerms(cosine + mse_scale * mse, cosine, mse)


def token_cosines(predicted: Tensor, target: Tensor) -> Tensor:
    """Cosine of each pair of tokens, lengths kept from 0 by 1e-8: (..., D), (..., D) -> (...)."""
    unit_p = predicted / (torch.linalg.vector_norm(predicted, dim=-1, keepdim=True) + EPS)
    unit_t = target / (torch.linalg.vector_norm(target, dim=-1, keepdim=True) + EPS)
    cosines: Tensor = (unit_p * unit_t).sum(-1)
    return cosines


def _weights(valid: Tensor, predicted: Tensor) -> Tensor:
    """(B, P) that sums to 1 over the valid tokens."""
    if valid.dtype != torch.bool or valid.shape != predicted.shape[:2]:
        raise ValueError(
            f"valid is a bool (B, P) = {tuple(predicted.shape[:2])}, got {valid.dtype} {tuple(valid.shape)}"
        )
    count = valid.sum()
    if not valid.is_cuda and not count:  # on CUDA the loss becomes NaN, which the loop names
        raise ValueError("valid has no True: no patch is left to compare")
    return valid.float() / count
