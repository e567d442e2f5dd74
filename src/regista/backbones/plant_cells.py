"""Outliers in fixed grid cells: which cells, their mark in the position table, and where they lie at other sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regista.backbones.positions import PositionResize, resize_positions
from regista.backbones.timm import TimmBackbone

Cell = tuple[int, int]
# Grids to be right on, as (rows, cols) where the table has 37 x 37, and how much each matters:
# first of all the table's own and 16 x 16, which is 224 px for a table of 518 px.
_GRIDS = {
    (37, 37): 4.0,
    (16, 16): 4.0,
    (24, 24): 1.0,
    (16, 24): 1.0,
    (24, 16): 1.0,
    (24, 34): 1.0,
    (34, 24): 1.0,
    (32, 32): 1.5,
    (20, 27): 0.5,
}
_DRAWN = 200
_APART = 3


def cell_map(cells: Sequence[Cell], own: Cell, grid: Cell, how: PositionResize) -> Tensor:
    """How much of a cell's mark arrives where, when the table is resized: (rows, cols), 1 for all of it."""
    table = torch.zeros(own)
    for row, col in cells:
        table[row, col] = 1.0
    return resize_positions(table.reshape(1, -1, 1), own, grid, how=how).reshape(grid)


def choose_cells(own: Cell, share: float, how: PositionResize, seed: int) -> list[Cell]:
    """Cells for outliers: about ``share`` of the grid, apart from each other.

    They are chosen so that on the grids people use a cell is either there or not there after
    resizing, and the share stays about the same.

    Args:
        own: (rows, cols) of the position table.
        share: Fraction of all cells, at least one cell.
        how: The table's resizing.
    """
    rows, cols = own
    wanted = max(1, round(share * rows * cols))
    grids = [(max(1, round(r * rows / 37)), max(1, round(c * cols / 37))) for r, c in _GRIDS]
    weight = torch.tensor(list(_GRIDS.values()))
    identity = torch.eye(rows * cols).unsqueeze(0)  # (1, P, P)
    whole, unclear = [], []
    for grid in grids:
        arriving = resize_positions(identity, own, grid, how=how).squeeze(0)  # (P', P)
        expected = share * grid[0] * grid[1]
        whole.append((arriving > 0.5).sum(0) / expected)
        unclear.append(((arriving > 0.25) & (arriving < 0.75)).sum(0) / expected)
    here, doubt = torch.stack(whole, 1), torch.stack(unclear, 1)  # (P, grids), of what is expected in all
    generator = torch.Generator().manual_seed(seed)
    chosen: list[Cell] = []
    reached = torch.zeros(len(grids))
    free = torch.ones(own, dtype=torch.bool)
    while len(chosen) < wanted and free.any():
        candidates = free.flatten().nonzero().flatten()
        candidates = candidates[torch.randperm(len(candidates), generator=generator)][:_DRAWN]
        off = (reached + here[candidates] - (len(chosen) + 1) / wanted).square()
        best = int(candidates[((off + doubt[candidates]) @ weight).argmin()])
        reached = reached + here[best]
        row, col = divmod(best, cols)
        free[max(0, row - _APART + 1) : row + _APART, max(0, col - _APART + 1) : col + _APART] = False
        chosen.append((row, col))
    return sorted(chosen)


def table_grid(backbone: TimmBackbone) -> Cell:
    """(rows, cols) of a model's learned position table; ``ValueError`` if it has none."""
    table = backbone.vit.pos_embed
    rows, cols = backbone.vit.patch_embed.grid_size or (0, 0)
    if not isinstance(table, Tensor) or table.shape[1] < rows * cols or not rows * cols:
        raise ValueError(f"{backbone.name} has no learned position table; plant kind 'content' instead of 'position'")
    return int(rows), int(cols)


@torch.no_grad()
def mark_cells(backbone: TimmBackbone, cells: Sequence[Cell], direction: Tensor, length: float) -> None:
    """Add a mark to some cells of the position table, in place.

    Args:
        direction: (D,) of unit length.
    """
    own = table_grid(backbone)
    table = backbone.vit.pos_embed.data
    mark = cell_map(cells, own, own, backbone.positions).flatten()[:, None] * direction * length  # (P, D)
    prefix = table.shape[1] - own[0] * own[1]
    table.split([prefix, own[0] * own[1]], 1)[1].add_(mark.to(table))


@torch.no_grad()
def unused_direction(backbone: TimmBackbone, images: Tensor) -> tuple[Tensor, float]:
    """Where the tokens that enter the first block vary least, and their median length.

    Returns:
        A unit direction (D,) and a length.
    """
    found: list[Tensor] = []
    handle = backbone.vit.blocks[0].register_forward_pre_hook(lambda _module, args: found.append(args[0].detach()))
    try:
        for batch in torch.split(images, 8):
            backbone(batch)
    finally:
        handle.remove()
    tokens = torch.cat(found).flatten(0, 1).double().cpu()
    _, vectors = torch.linalg.eigh(torch.cov(tokens.T))
    least = vectors.unbind(1)[0].float()
    return least * least.sum().sign(), float(tokens.norm(dim=1).median())
