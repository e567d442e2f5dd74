"""torchvision's VisionTransformer: ViT-B, L and H, also with SWAG weights or a convolutional stem."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from regista.backbones.base import Backbone
from regista.backbones.capture import BlockSites
from regista.backbones.inserted_registers import insert_by_hook
from regista.backbones.positions import TORCHVISION, PositionResize, resize_positions, swapped_parameter
from regista.tokens import square_grid


class TorchvisionBackbone(Backbone):
    """Adapter of a live torchvision ViT: [CLS][patches], no registers.

    Args:
        module: A ``torchvision.models.VisionTransformer``.
        name: For messages and records.
        image_size: (height, width) for ``preprocess``; the model's native size by default.
        positions: How its position table is resized; torchvision's own way by default.

    Raises:
        ValueError: for other classes.
    """

    library = "torchvision"

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        image_size: tuple[int, int] | None = None,
        positions: PositionResize = TORCHVISION,
    ) -> None:
        if not isinstance(module, VisionTransformer):
            raise ValueError(f"{name}: {type(module).__name__} is not a torchvision VisionTransformer")
        vit: Any = module
        first = next(iter(vit.encoder.layers))
        super().__init__(
            module,
            name=name,
            embed_dim=int(vit.hidden_dim),
            num_heads=int(first.self_attention.num_heads),
            patch_size=int(vit.patch_size),
            image_size=image_size or (int(vit.image_size), int(vit.image_size)),
        )
        self.vit = vit
        self.positions = positions

    def block_sites(self) -> Sequence[BlockSites]:
        """The encoder layers, ``self_attention`` and the last linear layer of ``mlp``."""
        return [BlockSites(layer, layer.self_attention, _last_linear(layer.mlp)) for layer in self.vit.encoder.layers]

    def patch_projection(self) -> nn.Module | None:
        """``conv_proj``; None for a stem of several convolutions, whose cells see past their patch."""
        projection = self.vit.conv_proj
        return projection if isinstance(projection, nn.Conv2d) else None

    def position_table(self) -> nn.Parameter | None:
        """``encoder.pos_embedding``, CLS row first."""
        table: nn.Parameter = self.vit.encoder.pos_embedding
        return table

    def encoder_entrance(self) -> tuple[nn.Module, bool]:
        """The input of ``encoder.layers``."""
        return self.vit.encoder.layers, True

    def insert_registers(self, registers: Tensor) -> None:
        """By a hook."""
        insert_by_hook(self, registers)

    def forward_tokens(self, images: Tensor) -> Tensor:
        """Stem, CLS and encoder, as the model's forward does without its head: (B, 3, H, W) -> (B, N, D).

        The model's forward takes images of its native size only.

        Raises:
            ValueError: if the stem does not give one cell a patch.
        """
        embedded = self.vit.conv_proj(images)  # (B, D, rows, cols)
        grid = self.layout((images.shape[-2], images.shape[-1])).grid_size
        if tuple(embedded.shape[-2:]) != grid:
            raise ValueError(
                f"{self.name}: the stem gives {tuple(embedded.shape[-2:])} cells, wanted {grid} for patches of "
                f"{self.patch_size} px; its strides must multiply to the patch size"
            )
        patches = embedded.flatten(2).transpose(1, 2)  # (B, P, D)
        cls = self.vit.class_token.expand(len(images), -1, -1)  # (B, 1, D)
        tokens: Tensor = self.vit.encoder(torch.cat([cls, patches], 1))
        return tokens

    def prepared(self, image_size: tuple[int, int]) -> AbstractContextManager[Any]:
        """Any image size, with the position table resized in the checkpoint's convention."""
        table = self.vit.encoder.pos_embedding  # (1, 1 + P, D)
        native = square_grid(table.shape[1] - 1)
        grid = (image_size[0] // self.patch_size, image_size[1] // self.patch_size)
        if grid == native:
            return nullcontext()
        resized = resize_positions(table, native, grid, num_prefix_tokens=1, how=self.positions)
        return swapped_parameter(self.vit.encoder, "pos_embedding", resized)

    def attention_backend(self) -> str:
        """The class of the first layer's attention."""
        sites, *_ = self.block_sites()
        return type(sites.attn).__name__


def _last_linear(mlp: nn.Module) -> nn.Module:
    *_, last = (child for child in mlp.modules() if isinstance(child, nn.Linear))
    return last
