"""From which block on the outliers are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regista.diagnosis.outliers import Outliers

PRESENT = 0.5


def main_block(found: Sequence[Outliers]) -> int | None:
    """The block at which the outliers stand out most: the largest ratio, weighted by how many there are.

    Args:
        found: Outliers of each block.
    """
    flagged = [block for block, outliers in enumerate(found) if outliers.mask.any()]
    if not flagged:
        return None
    most = max(found[block].share for block in flagged)

    def weight(block: int) -> float:
        return (found[block].ratio or 1.0) * min(1.0, 2 * found[block].share / most)

    return max(flagged, key=weight)


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
