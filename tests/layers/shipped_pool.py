"""Selective pooling as the released code does it, written from its description: complex spectrum, shifts, topk."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shipped_kernel(width: int) -> Tensor:
    """Gaussian of standard deviation sqrt(D) at the positions -D/2 + 1 .. D/2, peak 1, float64."""
    start = -((width - 1) // 2)
    values = [math.exp(-(position**2) / (2 * width)) for position in range(start, start + width)]
    return torch.tensor(values, dtype=torch.float64)


def shipped_filter(x: Tensor) -> Tensor:
    """(..., D) -> (..., D) through the complex spectrum with both shifts."""
    spectrum = torch.fft.fftshift(torch.fft.fft(x, dim=-1), dim=-1)
    spectrum = spectrum * shipped_kernel(x.shape[-1]).to(x.dtype)
    return torch.fft.ifft(torch.fft.ifftshift(spectrum, dim=-1), dim=-1).real


def slow_scores(x: Tensor, variant: str, eps: float) -> Tensor:
    low = shipped_filter(x)
    if variant == "paper":
        return low / ((low - x).abs() + eps)
    return x / (low - x).abs().clamp(min=eps)


def slow_pool(x: Tensor, k: int, variant: str, eps: float) -> tuple[Tensor, Tensor]:
    """Pooled (B, D) and votes (B, P), one channel after the other."""
    scores = slow_scores(x, variant, eps)
    batch, patches, width = x.shape
    pooled, votes = torch.zeros(batch, width, dtype=x.dtype), torch.zeros(batch, patches, dtype=torch.int64)
    for image in range(batch):
        for channel in range(width):
            ranked = sorted(range(patches), key=lambda patch: -float(scores[image, patch, channel]))
            for patch in ranked[:k]:
                pooled[image, channel] += x[image, patch, channel] / k
                votes[image, patch] += 1
    return pooled, votes
