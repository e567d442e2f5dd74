"""From which block on the outliers are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regista.diagnosis.outliers import Outliers

PRESENT = 0.5
SAME = 0.8


def main_block(found: Sequence[Outliers]) -> int | None:
    """The block to read the outliers at: the last one that still has those of the block where they stand out most.

    That is the block of the largest ratio among those with at least half of the largest share.
    The norms of outliers may fall again towards the output, or just there.

    Args:
        found: Outliers of each block.
    """
    flagged = [block for block, outliers in enumerate(found) if outliers.mask.any()]
    if not flagged:
        return None
    most = max(found[block].share for block in flagged)
    clearest = max(
        (block for block in flagged if found[block].share >= PRESENT * most),
        key=lambda block: found[block].ratio or 1.0,
    )
    return max(block for block in flagged if _overlap(found[block].mask, found[clearest].mask) >= SAME)


def _overlap(mask: Tensor, other: Tensor) -> float:
    """Intersection over union."""
    return float((mask & other).sum()) / max(1.0, float((mask | other).sum()))


def onset_block(found: Sequence[Outliers], main: int | None) -> int | None:
    """The first block from which on the outliers of block ``main`` are outliers without a gap.

    At each earlier block at least half of them must be outliers already.
    """
    if main is None:
        return None
    onset = main
    target = found[main].mask
    for block in range(main - 1, -1, -1):
        if not float((found[block].mask & target).sum()) >= PRESENT * float(target.sum()):
            break
        onset = block
    return onset


def norm_curves(norms: Tensor, valid: Tensor) -> dict[str, list[float]]:
    """Median, 99th percentile and maximum of the patch norms after each block: norms (n, blocks, rows, cols)."""
    curves: dict[str, list[float]] = {"median": [], "p99": [], "max": []}
    for block in range(norms.shape[1]):
        values = norms[:, block][valid].double()
        at = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
        ordered = values.sort().values
        picked = ordered[(at * (len(ordered) - 1)).round().long()].tolist()
        for name, value in zip(curves, picked, strict=True):
            curves[name].append(value)
    return curves
