"""Attention probabilities and their column means, in plain tensor code."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20


def attention_probabilities(q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(scale * q k^T + mask) in float32: (..., n, K), (..., N, K) -> (..., n, N).

    Args:
        q, k: Queries and keys as used in the product, unscaled.
        mask: Boolean (True = attend) or additive, broadcast to (..., n, N).
        scale: K ** -0.5 if None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (q.float() * scale) @ k.float().transpose(-1, -2)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask.float()
    return logits.softmax(-1)


def attention_received(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output together with the mean attention each token receives.

    Works through the queries in chunks that fit the cache, one image at a time, so the N x N
    map never exists as a whole.

    Args:
        q, k, v: (B, H, n, K), (B, H, N, K), (B, H, N, K).

    Returns:
        The attention output (B, H, n, K) in the dtype of ``v``, and for each key token the
        mean over the n queries of its attention probability, (B, H, N) float32; over N it
        sums to 1.
    """
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    budget = _CHUNK_ELEMENTS if q.device.type == "cpu" else _CHUNK_ELEMENTS << 7
    rows = max(1, min(queries, budget // (heads * keys)))
    outputs, received = [], []
    for image in range(len(q)):
        total = torch.zeros(heads, keys, device=q.device)
        chunks = []
        for start in range(0, queries, rows):
            part = q[image].narrow(1, start, min(rows, queries - start))  # (H, rows, K)
            part_mask = _mask_rows(mask, image, start, part.shape[1])
            probabilities = attention_probabilities(part, k[image], part_mask, scale)  # (H, rows, N)
            total = total + probabilities.sum(1)
            chunks.append(probabilities.to(v.dtype) @ v[image])
        outputs.append(torch.cat(chunks, 1))
        received.append(total / queries)
    return torch.stack(outputs), torch.stack(received)  # (B, H, n, K), (B, H, N)


def _mask_rows(mask: Tensor | None, image: int, start: int, rows: int) -> Tensor | None:
    if mask is None:
        return None
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    chosen = mask[min(image, len(mask) - 1)]  # (H or 1, n or 1, N)
    return chosen if chosen.shape[1] == 1 else chosen.narrow(1, start, rows)
