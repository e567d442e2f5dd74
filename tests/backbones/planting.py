"""Models and pictures that the tests of planted outliers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import tiny_vit


@dataclass(frozen=True)
class Pictures:
    """A kind of synthetic picture, other ones for every seed."""

    seed: int

    def images(self, count: int, size: tuple[int, int] = (112, 112)) -> Tensor:
        """Smooth fields with hard-edged discs on them, normalised as a ViT sees them: (B, 3, H, W)."""
        draw = torch.Generator().manual_seed(self.seed)
        rows = torch.linspace(0, 1, size[0]).view(1, 1, -1, 1)
        cols = torch.linspace(0, 1, size[1]).view(1, 1, 1, -1)
        field = F.interpolate(
            torch.randn(count, 3, 5, 5, generator=draw), size=size, mode="bicubic", align_corners=False
        )
        for _ in range(4):
            top, left, radius = torch.rand(3, count, 1, 1, 1, generator=draw).unbind(0)
            disc = (rows - top) ** 2 + (cols - left) ** 2 < (0.05 + 0.15 * radius) ** 2
            field = torch.where(disc, torch.randn(count, 3, 1, 1, generator=draw), field)
        return field.clamp(-2.1, 2.6)


NORTH = Pictures(1)  # to plant on
SOUTH = Pictures(2)  # to look at


def tiny_with(**options: Any) -> TimmBackbone:
    """The tiny model, with other options where given."""
    return tiny_vit(**options)


def outlier_norms(backbone: TimmBackbone, images: Tensor, block: int) -> Tensor:
    """Patch norms after a block over their image's median: (B, rows, cols)."""
    return outlier_norms_of(backbone, images, (block,))[block]


def outlier_norms_of(backbone: TimmBackbone, images: Tensor, blocks: Sequence[int]) -> dict[int, Tensor]:
    """The same for several blocks, in one forward."""
    layout = backbone.layout((images.shape[-2], images.shape[-1]))

    def over_median(tokens: Tensor) -> Tensor:
        norms = layout.patch_map(tokens).float().norm(dim=1)
        return norms / norms.flatten(1).median(1).values.view(-1, 1, 1)

    with torch.inference_mode():
        captured = backbone(images, {f"blocks.{block}.resid": over_median for block in blocks}).captured
    return {block: captured[f"blocks.{block}.resid"] for block in blocks}
