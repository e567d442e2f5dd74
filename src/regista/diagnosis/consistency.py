"""Patches whose features do not survive a shift of the image, whatever their norm.

An artifact is tied to a token, not to what the picture shows there: when the image moves by
whole patches, the feature of the same content changes. This is the observation that
"Denoising Vision Transformers" (2401.02957) and PH-Reg (2505.21501) build on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.base import Backbone


def default_shifts(grid_size: tuple[int, int]) -> list[tuple[int, int]]:
    """Four diagonal shifts (dy, dx) in whole patches, about a tenth of the grid."""
    dy, dx = (max(1, round(cells / 10)) for cells in grid_size)
    return [(dy, dx), (dy, -dx), (-dy, dx), (-dy, -dx)]


def shift_consistency(
    backbone: Backbone, pixels: Tensor, patches: Tensor, shifts: list[tuple[int, int]] | None = None
) -> Tensor:
    """Cosine of each patch feature to the mean feature of the same content in shifted images.

    Args:
        pixels: (B, 3, H, W), preprocessed.
        patches: (B, P, D), the features of the unshifted images.
        shifts: (dy, dx) in patches; content moves down by dy and right by dx, and the border
            is repeated where nothing is left. One more forward for each.

    Returns:
        (B, rows, cols) in [-1, 1]; a cell that every shift moves out of the image gets 1.
    """
    layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))
    rows, cols = layout.grid_size
    total = torch.zeros(len(pixels), rows, cols, patches.shape[-1], device=patches.device)
    seen = torch.zeros(rows, cols, device=patches.device)
    for dy, dx in shifts or default_shifts(layout.grid_size):
        if abs(dy) >= rows or abs(dx) >= cols:
            continue
        moved = _shift(pixels, dy * layout.patch_size, dx * layout.patch_size)
        grid = backbone(moved).patches.float().reshape(len(moved), rows, cols, -1)  # (B, rows, cols, D)
        here = (slice(max(0, -dy), rows - max(0, dy)), slice(max(0, -dx), cols - max(0, dx)))
        there = (slice(max(0, dy), rows - max(0, -dy)), slice(max(0, dx), cols - max(0, -dx)))
        total[(slice(None), *here)] += grid[(slice(None), *there)]
        seen[here] += 1
    own = patches.float().reshape(len(patches), rows, cols, -1)
    cosine = torch.cosine_similarity(own, total, dim=-1)
    return torch.where(seen > 0, cosine, torch.ones_like(cosine))


def _shift(pixels: Tensor, dy: int, dx: int) -> Tensor:
    height, width = pixels.shape[-2:]
    padded = F.pad(pixels, (abs(dx), abs(dx), abs(dy), abs(dy)), mode="replicate")
    return padded.narrow(-2, abs(dy) - dy, height).narrow(-1, abs(dx) - dx, width)
