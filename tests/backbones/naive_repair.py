"""Slow and plain: how tokens of one map are replaced, cell by cell."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def neighbours(row: int, col: int, rows: int, cols: int) -> list[tuple[int, int]]:
    around = [(row + down, col + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    return [(r, c) for r, c in around if 0 <= r < rows and 0 <= c < cols]


def averaged(grid: Tensor, cutoff: float) -> Tensor:
    """One map (rows, cols, D) by loops: rings of outliers are filled from outside."""
    rows, cols, _ = grid.shape
    wrong = {(r, c) for r in range(rows) for c in range(cols) if float(grid[r][c].norm()) > cutoff}
    out = grid.clone()
    while wrong:
        filled = {}
        for cell in wrong:
            good = [near for near in neighbours(*cell, rows, cols) if near not in wrong]
            if good:
                filled[cell] = torch.stack([out[near] for near in good]).mean(0)
        if not filled:
            return grid
        for cell, value in filled.items():
            out[cell] = value
        wrong -= set(filled)
    return out


def smoothed(grid: Tensor, direction: Tensor, deviations: float, border: bool, least: int) -> tuple[Tensor, int]:
    """SINDER's detection and repair of one map (rows, cols, D) by loops, and how many cells it found."""
    rows, cols, _ = grid.shape
    cells = [(r, c) for r in range(rows) for c in range(cols)]
    along = {cell: abs(float(torch.cosine_similarity(grid[cell], direction, dim=0))) for cell in cells}
    mean = sum(along.values()) / len(cells)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in along.values()) / (len(cells) - 1))
    found = [cell for cell in cells if along[cell] > mean + deviations * deviation]
    if border:
        found = [(r, c) for r, c in found if 0 < r < rows - 1 and 0 < c < cols - 1]
    if len(found) < least:
        return grid, 0
    out = grid.clone()
    for r, c in found:
        window = neighbours(r, c, rows, cols)
        weights = [2.0 ** (2 - abs(r - y) - abs(c - x)) * math.exp(-along[y, x] / 0.1) for y, x in window]
        out[r, c] = sum(weight * grid[cell] for weight, cell in zip(weights, window, strict=True)) / sum(weights)
    return out, len(found)
