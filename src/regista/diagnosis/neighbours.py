"""How much a patch looks like its neighbours, right after the patch embedding.

In DINOv2 the tokens that become outliers sit where patches repeat their neighbours (Darcet et
al., 2309.16588, figure 5a).
"""

from __future__ import annotations

import torch
from torch import Tensor


def neighbour_cosine(embedded: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Mean cosine similarity of each patch to its neighbours above, below, left and right.

    Args:
        embedded: (B, P, D), patch embeddings without positions.
        grid_size: (rows, cols), P = rows * cols.

    Returns:
        (B, rows, cols) in [-1, 1]; edges have three neighbours, corners two, a single cell 1.
    """
    rows, cols = grid_size
    unit = torch.nn.functional.normalize(embedded.float(), dim=-1)
    grid = unit.reshape(len(unit), rows, cols, -1)  # (B, rows, cols, D)
    total = torch.zeros(grid.shape[:3], device=grid.device)
    count = torch.zeros(rows, cols, device=grid.device)
    for axis, length in ((1, rows), (2, cols)):
        first, second = grid.narrow(axis, 0, length - 1), grid.narrow(axis, 1, length - 1)
        cosine = (first * second).sum(-1)
        for start in (0, 1):
            total.narrow(axis, start, length - 1).add_(cosine)
            count.narrow(axis - 1, start, length - 1).add_(1)
    return torch.where(count > 0, total / count.clamp(min=1), torch.ones_like(total))
