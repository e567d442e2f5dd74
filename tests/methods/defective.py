"""A small random ViT in whose block 1 one MLP unit writes a long vector on chosen cells, whatever the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import GRID, tiny_vit

BLOCK = 1
INNER = ((2, 2), (4, 6), (6, 3))


def defective_vit(cells: Sequence[tuple[int, int]] = INNER, *, gated: bool = False) -> tuple[TimmBackbone, Tensor]:
    """The model and the direction (D,) in which its outliers lie.

    Cells are marked along one channel pattern in the positions; nothing else has a part along it.
    """
    vit = tiny_vit(seed=3)
    module: Any = vit.module
    generator = torch.Generator().manual_seed(5)
    read, write = torch.randn(2, vit.embed_dim, generator=generator).unbind(0)
    read, write = (F.normalize(x - x.mean(), dim=0) for x in (read, write))
    with torch.no_grad():
        for block in module.blocks:
            if gated:
                block.mlp = _gated(vit.embed_dim, generator)
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.mul_(0.05).sub_(torch.outer(read, read @ layer.weight))
                layer.bias.zero_()
        kernel = module.patch_embed.proj.weight
        kernel.sub_(torch.einsum("d,e,eijk->dijk", read, read, kernel))
        table = module.pos_embed
        table.sub_((table @ read).unsqueeze(-1) * read)
        patches = vit.layout().take(table, "patches")
        for row, col in cells:
            patches.select(1, row * GRID + col).add_(4 * read)
        mlp = module.blocks[BLOCK].mlp
        if gated:
            mlp.fc1_g.weight.select(0, 0).zero_()
            mlp.fc1_g.bias.select(0, 0).fill_(1)
            mlp.fc1_x.weight.select(0, 0).copy_(2 * read)
            mlp.fc1_x.bias.select(0, 0).zero_()
        else:
            mlp.fc1.weight.select(0, 0).copy_(2 * read)
            mlp.fc1.bias.select(0, 0).fill_(-4)
        mlp.fc2.weight.select(1, 0).copy_((10 if gated else 60) * write)
    vit.name = "defective"
    return vit, write


def _gated(width: int, generator: torch.Generator) -> torch.nn.Module:
    from timm.layers.mlp import SwiGLU

    mlp = SwiGLU(width, 2 * width)
    for parameter in mlp.parameters():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return mlp.eval()


def truth(cells: Sequence[tuple[int, int]] = INNER, count: int = 1) -> Tensor:
    """Where the outliers are: (count, rows, cols) bool."""
    mask = torch.zeros(count, GRID, GRID, dtype=torch.bool)
    for row, col in cells:
        mask[:, row, col] = True
    return mask
