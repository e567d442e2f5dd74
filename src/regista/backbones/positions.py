"""Resizing absolute position tables, in each model family's own convention.

Features at a size other than the training size depend on how the table is resized: between
the conventions below the tables differ by up to a quarter of their norm (37 x 37 to 16 x 16),
so the convention belongs to the checkpoint and travels with the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PositionResize:
    """How a family resizes its position table; always to an exact size, never by a factor.

    Attributes:
        mode: "bicubic" or "bilinear".
        antialias: Low-pass before shrinking.
        align_corners: Corner cells keep their place instead of corner edges.
        offset: Added to the new number of cells when the step between samples is computed, and
            so a shift of the samples; the size stays exact. DINOv2's hub adds 0.1.
    """

    mode: str = "bicubic"
    antialias: bool = False
    align_corners: bool = False
    offset: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a configuration file."""
        return asdict(self)


TIMM = PositionResize(antialias=True)
OPEN_CLIP = PositionResize(antialias=True)
TRANSFORMERS = PositionResize()
DINOV2_HUB = PositionResize(offset=0.1)  # without registers; with them it is TIMM
TORCHVISION = PositionResize(align_corners=True)


def resize_positions(
    table: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    num_prefix_tokens: int = 0,
    how: PositionResize = TIMM,
) -> Tensor:
    """Resample the patch rows of a position table; prefix rows are kept.

    Args:
        table: (1, prefix + P, D), the prefix rows first.
        old_grid, new_grid: (rows, cols); the same grid returns ``table`` itself.

    Returns:
        (1, prefix + P', D) in the dtype of ``table``; computed in float32.

    Raises:
        ValueError: if ``table`` does not fit ``old_grid``.
    """
    expected = num_prefix_tokens + old_grid[0] * old_grid[1]
    if table.shape[1] != expected:
        raise ValueError(
            f"the position table has {table.shape[1]} rows, wanted {expected} "
            f"({num_prefix_tokens} prefix + {old_grid[0]}x{old_grid[1]})"
        )
    if old_grid == new_grid:
        return table
    prefix, patches = torch.split(table, [num_prefix_tokens, expected - num_prefix_tokens], dim=1)
    grid = torch.unflatten(patches.float(), 1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, cols)
    options: dict[str, Any] = {"mode": how.mode, "antialias": how.antialias, "align_corners": how.align_corners}
    if how.offset:
        factors = [(new + how.offset) / old for new, old in zip(new_grid, old_grid, strict=True)]
        grid = F.interpolate(grid, scale_factor=factors, **options)
    else:
        grid = F.interpolate(grid, size=new_grid, **options)
    resized = grid.flatten(2).transpose(1, 2).to(table.dtype)  # (1, P', D)
    return torch.cat([prefix, resized], 1)


@contextmanager
def swapped_parameter(module: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Let ``module`` see ``value`` in place of one of its own parameters; undone on exit.

    Gradients flow through ``value`` to what it was computed from.
    """
    parameters: dict[str, Any] = module._parameters
    before = parameters[name]
    parameters[name] = value
    try:
        yield
    finally:
        parameters[name] = before


@contextmanager
def swapped_attributes(module: object, **values: Any) -> Iterator[None]:
    """Set plain attributes of ``module`` and give the old values back on exit."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
