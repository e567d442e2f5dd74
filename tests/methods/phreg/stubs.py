"""Backbones whose features can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.base import Backbone

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
WHITE = [(1 - mean) / std for mean, std in zip(MEAN, STD, strict=True)]


class StubBackbone(Backbone):
    """Patch tokens by a function of images and layout, CLS and registers filled with 1e6.

    Args:
        patches: (images (B, 3, H, W), grid_size) -> (B, P, D).
    """

    def __init__(
        self,
        patches: Callable[[Tensor, tuple[int, int]], Tensor],
        *,
        patch_size: int = 4,
        num_register_tokens: int = 0,
        num_cls_tokens: int = 1,
        image_size: tuple[int, int] = (32, 32),
        embed_dim: int = 6,
    ) -> None:
        super().__init__(
            nn.BatchNorm1d(2),  # some weights, the same in every stub
            name="stub",
            embed_dim=embed_dim,
            num_heads=1,
            patch_size=patch_size,
            image_size=image_size,
            num_register_tokens=num_register_tokens,
            num_cls_tokens=num_cls_tokens,
            mean=MEAN,
            std=STD,
        )
        self.patches = patches
        self.seen: list[Tensor] = []

    def block_sites(self) -> list:  # type: ignore[type-arg]
        return []

    def forward_tokens(self, images: Tensor) -> Tensor:
        self.seen.append(images.clone())
        layout = self.layout((images.shape[-2], images.shape[-1]))
        patches = self.patches(images, layout.grid_size)
        parts = {
            name: patches
            if name == "patches"
            else patches.new_full((len(images), layout.count(name), patches.shape[-1]), 1e6)
            for name in ("cls", "registers", "patches")
        }
        return layout.join(parts)


def patch_statistics(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Mean and maximum of each channel in a patch: moves and flips with the image. (B, P, 6)."""
    size = images.shape[-2] // grid_size[0]
    maps = torch.cat([F.avg_pool2d(images, size), F.max_pool2d(images, size)], 1)
    return maps.flatten(2).transpose(1, 2)


def cell_numbers(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The cell's own (row, col), whatever the image: an artifact of place. (B, P, 2)."""
    cells = torch.cartesian_prod(torch.arange(grid_size[0]), torch.arange(grid_size[1]))
    return cells.to(images).expand(len(images), -1, -1)


def spike_at(row: int, col: int) -> Callable[[Tensor, tuple[int, int]], Tensor]:
    """1 at one cell, 0 elsewhere. (B, P, 1)."""

    def patches(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
        grid = torch.zeros(len(images), *grid_size, 1)
        grid[:, row, col] = 1
        return grid.flatten(1, 2)

    return patches


def position_dependent(images: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """Statistics of the patch times its place: neither fixed nor moving with the image. (B, P, 6)."""
    rows, cols = cell_numbers(images, grid_size).split(1, -1)  # type: ignore[no-untyped-call]
    return patch_statistics(images, grid_size) * (1 + 0.1 * rows) + (0.3 * cols).sin()
