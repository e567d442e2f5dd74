"""Replacing tokens of a patch map by weighted means of the tokens around them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.layers.channel_filter import at_least_float32

Kernel = Literal["uniform", "gaussian"]

# 3 x 3 in reading order; the Gaussian is the binomial one, (1, 2, 1) x (1, 2, 1).
KERNELS: dict[str, tuple[float, ...]] = {
    "uniform": (1, 1, 1, 1, 1, 1, 1, 1, 1),
    "gaussian": (1, 2, 1, 2, 4, 2, 1, 2, 1),
}
_STEPS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1))


def neighbour_average(tokens_map: Tensor, mask: Tensor, *, kernel: Kernel = "uniform") -> Tensor:
    """Replace masked cells by the mean of their unmasked 8 neighbours: (B, rows, cols, D) -> same shape.

    Cells with no unmasked neighbour wait: once their neighbours are filled they take the mean of
    those, ring by ring towards the middle of a cluster. Nothing lies beyond the border. Other
    cells keep their bits. An image whose every cell is masked has nothing to average and comes
    back unchanged.

    Args:
        tokens_map: (B, rows, cols, D) float.
        mask: (B, rows, cols) bool, True where a token is to be replaced.
        kernel: Weights of the neighbours: "uniform", or "gaussian" (2 beside, 1 across a corner).

    Returns:
        A new tensor in the dtype of the input; the means are taken in float32 at least.

    Raises:
        ValueError: for shapes that do not fit, an unknown kernel, or a token that is NaN or infinite.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {tuple(KERNELS)}, got {kernel!r}")
    check_map(tokens_map, mask)
    around = (*KERNELS[kernel][:4], 0.0, *KERNELS[kernel][5:])
    repaired, waiting = at_least_float32(tokens_map), mask
    while bool(waiting.any()):
        repaired, left = window_average(repaired, waiting, (~waiting).to(repaired.dtype), around)
        if torch.equal(left, waiting):
            break
        waiting = left
    return torch.where((mask & ~waiting).unsqueeze(-1), repaired.to(tokens_map.dtype), tokens_map)


def window_average(
    tokens_map: Tensor, mask: Tensor, weights: Tensor, kernel: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Replace masked cells by a weighted mean over their 3 x 3 window, all at once.

    The weight of a cell is its own times that of its place in the window; cells beyond the border
    weigh nothing. Works through the masked cells alone.

    Args:
        tokens_map: (B, rows, cols, D) float32 or float64.
        mask: (B, rows, cols) bool, the cells to replace.
        weights: (B, rows, cols), >= 0, a weight for each cell.
        kernel: Nine weights >= 0, the window in reading order.

    Returns:
        The new map, and the (B, rows, cols) mask of cells left unchanged because every weight in
        their window is 0.
    """
    stride = tokens_map.shape[2] + 2  # cells of a padded row
    tokens = F.pad(tokens_map, (0, 0, 1, 1, 1, 1)).flatten(0, 2)  # (cells, D)
    shares = F.pad(weights.to(tokens.dtype), (1, 1, 1, 1)).flatten()  # (cells,)
    centres = F.pad(mask, (1, 1, 1, 1)).flatten().nonzero().squeeze(1)  # (n,)
    total = tokens.new_zeros(len(centres), tokens.shape[1])  # (n, D)
    weight = tokens.new_zeros(len(centres))
    for (down, right), place in zip(_STEPS, kernel, strict=True):
        if place:
            cells = centres + down * stride + right
            share = shares[cells] * place
            total = total + share.unsqueeze(1) * tokens[cells]
            weight = weight + share
    found = weight > 0
    means = total / weight.masked_fill(~found, 1).unsqueeze(1)
    left = mask.clone()
    left[mask] = ~found
    repaired = tokens_map.clone()
    repaired[mask & ~left] = means[found]
    return repaired, left


def check_map(tokens_map: Tensor, mask: Tensor | None = None) -> None:
    """Raise ``ValueError`` unless the tokens are a finite (B, rows, cols, D) and the mask fits."""
    if tokens_map.ndim != 4 or not tokens_map.is_floating_point():
        got = f"{tuple(tokens_map.shape)} {tokens_map.dtype}"
        raise ValueError(f"tokens must be a float tensor (B, rows, cols, D), got {got}; see TokenLayout.patch_map")
    if mask is not None and (mask.shape != tokens_map.shape[:3] or mask.dtype != torch.bool):
        wanted = tuple(tokens_map.shape[:3])
        raise ValueError(f"mask must be a bool tensor (B, rows, cols) = {wanted}, got {tuple(mask.shape)} {mask.dtype}")
    images = (~tokens_map.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if images:
        raise ValueError(f"tokens of images {images} of the batch are NaN or infinite; check the model's weights")
