"""Where outliers sit: the same cells in every image, or wherever the content puts them."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_PAIRED = 512


def position_frequency(mask: Tensor) -> Tensor:
    """Share of images in which each cell is an outlier: (n, rows, cols) bool -> (rows, cols)."""
    return mask.float().mean(0)


def place_overlap(mask: Tensor) -> float | None:
    """How much two images share their outlier cells, beyond chance: 0 chance, 1 the same cells.

    The mean over pairs of |A and B| / min(|A|, |B|), images without an outlier left out, is
    set against its expectation |larger| / P for random cells. Of many images at most
    ``MOST_PAIRED``, evenly spaced, are paired. None with fewer than two such images.
    """
    flat = mask.flatten(1)
    flat = flat[flat.any(1)]
    flat = flat[:: -(-len(flat) // MOST_PAIRED) or 1].double()
    sizes = flat.sum(1)
    if len(flat) < 2:
        return None
    common = flat @ flat.T
    smaller = torch.minimum(sizes[:, None], sizes[None])
    larger = torch.maximum(sizes[:, None], sizes[None])
    pairs = ~torch.eye(len(flat), dtype=torch.bool)
    observed = float((common / smaller)[pairs].mean())
    chance = float((larger / flat.shape[1])[pairs].mean())
    return (observed - chance) / (1 - chance) if chance < 1 else None


def fixed_place(mask: Tensor) -> str | None:
    """Whether images share half of their outlier cells beyond chance: "fixed", "moving", or None if unknown."""
    overlap = place_overlap(mask)
    if overlap is None:
        return None
    return "fixed" if overlap >= 0.5 else "moving"
