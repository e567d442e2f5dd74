"""Hugging Face transformers' ViTs: DINOv2, DINOv2 with registers, DINOv3, ViT, CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersModel
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.vit.modeling_vit import ViTModel

from regista.backbones.base import IMAGENET_MEAN, IMAGENET_STD, Backbone
from regista.backbones.capture import BlockSites
from regista.backbones.inserted_registers import insert_by_hook
from regista.backbones.positions import TRANSFORMERS, PositionResize, resize_positions, swapped_attributes
from regista.backbones.transformers_registers import append_registers, with_register_class
from regista.tokens import TokenLayout, square_grid

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Family:
    """Where transformers keeps the parts of one kind of ViT.

    Attributes:
        layers, attention, patch, positions: Attribute paths to the blocks (from the model), the
            attention (from a block), and from the model the patch convolution and the position
            table (None for RoPE).
        mlp_out: The last linear layer of the MLP (from a block), the first name that exists.
        final_norm: A norm that the model itself applies to its pooled output only.
        asks_for_resizing: Positions are resized only with ``interpolate_pos_encoding=True``.
        has_cls: Whether the sequence starts with a CLS token.
        mean, std: What the released checkpoints of the family are normalised with.
    """

    layers: str = "encoder.layer"
    attention: str = "attention"
    mlp_out: tuple[str, ...] = ("mlp.fc2", "mlp.down_proj")
    patch: str = "embeddings.patch_embeddings.projection"
    positions: str | None = "embeddings.position_embeddings"
    final_norm: str | None = None
    asks_for_resizing: bool = False
    has_cls: bool = True
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


_CONTRASTIVE: dict[str, Any] = {
    "layers": "encoder.layers",
    "attention": "self_attn",
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding.weight",
    "asks_for_resizing": True,
}
FAMILIES: dict[type[nn.Module], Family] = {
    Dinov2Model: Family(),
    Dinov2WithRegistersModel: Family(),
    DINOv3ViTModel: Family(layers="model.layer", patch="embeddings.patch_embeddings", positions=None),
    ViTModel: Family(layers="layers", asks_for_resizing=True, mean=HALF, std=HALF),
    CLIPVisionModel: Family(**_CONTRASTIVE, final_norm="post_layernorm", mean=CLIP_MEAN, std=CLIP_STD),
    SiglipVisionModel: Family(**_CONTRASTIVE, has_cls=False, mean=HALF, std=HALF),
}


class TransformersBackbone(Backbone):
    """Adapter of a live transformers ViT.

    Tokens are ``last_hidden_state``. For CLIP, whose model norms only the pooled CLS token, they
    are ``post_layernorm`` of all of them, so that CLS is ``pooler_output`` (before the
    projection) and the patches lie in the same space. Any image size is taken, with positions
    resized as transformers does it.

    Args:
        module: A ``Dinov2Model``, ``Dinov2WithRegistersModel``, ``DINOv3ViTModel``, ``ViTModel``,
            ``CLIPVisionModel`` or ``SiglipVisionModel``, or a model that holds one of them, such
            as ``CLIPModel``, ``SiglipModel`` or a ``...ForImageClassification``.
        name: For messages and records.
        image_size: (height, width) for ``preprocess``; the model's native size by default.
        mean, std: As in the checkpoint's preprocessor configuration; the family's by default.

    Attributes:
        positions: How its position table is resized; None is the model's own way.
        full_model: What was given: of CLIP and SigLIP, ``full_model.text_model`` is the text tower.

    Raises:
        ValueError: for other models, and for non-square patches or position grids, which
            transformers builds but cannot run.
    """

    library = "transformers"

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        image_size: tuple[int, int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        vit, family = _vision_tower(module, name)
        config: Any = vit.config
        projection = _part(vit, family.patch)
        patch = _square(projection.kernel_size, name, "patch size")
        native = _square(config.image_size, name, "image size")
        registers = getattr(vit.embeddings, "register_tokens", None)
        super().__init__(
            vit,
            name=name,
            embed_dim=int(config.hidden_size),
            num_heads=int(config.num_attention_heads),
            patch_size=patch,
            image_size=image_size or (native, native),
            num_register_tokens=0 if registers is None else int(registers.shape[1]),
            num_cls_tokens=1 if family.has_cls else 0,
            mean=family.mean if mean is None else mean,
            std=family.std if std is None else std,
        )
        self.vit: Any = vit
        self.family = family
        self.full_model: Any = module
        self.positions: PositionResize | None = None

    def block_sites(self) -> Sequence[BlockSites]:
        """The layers, their attention, and ``fc2`` or a gated MLP's ``down_proj``."""
        return [
            BlockSites(layer, _part(layer, self.family.attention), _first_part(layer, self.family.mlp_out))
            for layer in _part(self.vit, self.family.layers)
        ]

    def patch_projection(self) -> nn.Module | None:
        """The convolution of the patch embedding."""
        projection: nn.Module = _part(self.vit, self.family.patch)
        return projection

    def pool_attention(self) -> nn.Module | None:
        """The attention of SigLIP's pooling head, whose query is the learned probe."""
        head = getattr(self.vit, "head", None)
        return getattr(head, "attention", None)

    def position_table(self) -> nn.Parameter | None:
        """The learned absolute positions, CLS row first; None for RoPE."""
        table: nn.Parameter | None = _part(self.vit, self.family.positions) if self.family.positions else None
        return table

    def register_table(self) -> nn.Parameter | None:
        """``register_tokens`` of the embeddings, or those inserted."""
        own: nn.Parameter | None = getattr(self.vit.embeddings, "register_tokens", None)
        return own if own is not None and own.shape[1] else super().register_table()

    def encoder_entrance(self) -> tuple[nn.Module, bool]:
        """The input of CLIP's first norm, else the output of the embeddings."""
        first_norm = getattr(self.vit, "pre_layrnorm", None)
        return (self.vit.embeddings, False) if first_norm is None else (first_norm, True)

    def pooling_head(self) -> nn.Module | None:
        """SigLIP's attention pooling."""
        head: nn.Module | None = getattr(self.vit, "head", None)
        return head

    def insert_registers(self, registers: Tensor) -> None:
        """Into the model's own registers; a Dinov2 becomes a Dinov2WithRegisters; else by a hook."""
        if isinstance(self.vit, Dinov2Model):
            self.positions = self.positions or TRANSFORMERS
            self.vit = self.module = self.full_model = with_register_class(self.vit, registers)
            self.family = FAMILIES[type(self.vit)]
        elif hasattr(self.vit.embeddings, "register_tokens"):
            append_registers(self.vit, registers)
        else:
            insert_by_hook(self, registers)

    def prepared(self, image_size: tuple[int, int]) -> AbstractContextManager[Any]:
        """Positions as the model resizes them, or in ``positions``' convention where one is set."""
        table = self.position_table()
        if self.positions is None or table is None or not hasattr(self.vit.embeddings, "interpolate_pos_encoding"):
            return nullcontext()
        native, grid = square_grid(table.shape[-2] - self.num_cls_tokens), self.layout(image_size).grid_size
        rows = table.reshape(1, -1, self.embed_dim)
        resized = resize_positions(rows, native, grid, num_prefix_tokens=self.num_cls_tokens, how=self.positions)
        return swapped_attributes(self.vit.embeddings, interpolate_pos_encoding=lambda *_sizes: resized)

    def forward_tokens(self, images: Tensor) -> Tensor:
        """The model's forward: (B, 3, H, W) -> (B, N, D)."""
        resizing = {"interpolate_pos_encoding": True} if self.family.asks_for_resizing else {}
        tokens: Tensor = self.vit(pixel_values=images, return_dict=True, **resizing).last_hidden_state
        if self.family.final_norm is not None:
            tokens = _part(self.vit, self.family.final_norm)(tokens)
        return tokens

    def to_joint_space(self, tokens: Tensor) -> Tensor:
        """CLIP's ``post_layernorm`` and ``visual_projection``: (B, N, D) -> (B, N, E)."""
        projection = getattr(self.full_model, "visual_projection", None)
        if projection is None or self.family.final_norm is None:
            return super().to_joint_space(tokens)
        joint: Tensor = projection(_part(self.vit, self.family.final_norm)(tokens))
        return joint

    def global_vector(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """The pooling head's output where there is one (SigLIP), else CLS or the mean patch: (B, D)."""
        if self.pool_attention() is not None:
            pooled: Tensor = self.vit.head(tokens)
            return pooled
        return super().global_vector(tokens, layout)

    def fused_attention(self) -> AbstractContextManager[Any]:
        """Set the attention implementation to "sdpa" in the configuration the layers read; undone on exit."""
        stack = ExitStack()
        configs = {id(sites.attn.config): sites.attn.config for sites in self.block_sites()}
        for config in configs.values():
            stack.enter_context(swapped_attributes(config, _attn_implementation="sdpa"))
        return stack

    def attention_backend(self) -> str:
        """The attention implementation of the first layer: "sdpa", "eager", "flash_attention_2" ..."""
        sites, *_ = self.block_sites()
        config: Any = sites.attn.config
        return str(config._attn_implementation)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """Move the whole model, the text tower too; returns self."""
        self.full_model.to(device=device, dtype=dtype)
        return self


def _vision_tower(module: nn.Module, name: str) -> tuple[Any, Family]:
    """The supported ViT that ``module`` is or holds, and its family."""
    for candidate in (module, *module.children()):
        for kind, family in FAMILIES.items():
            if isinstance(candidate, kind):
                return candidate, family
    wanted = ", ".join(kind.__name__ for kind in FAMILIES)
    raise ValueError(f"{name}: {type(module).__name__} is not one of {wanted}, nor a model that holds one")


def _part(module: Any, path: str) -> Any:
    for attribute in path.split("."):
        module = getattr(module, attribute)
    return module


def _first_part(module: Any, paths: Sequence[str]) -> Any:
    for path in paths:
        try:
            return _part(module, path)
        except AttributeError:
            continue
    raise ValueError(f"none of {tuple(paths)} in {type(module).__name__}; its MLP is of an unknown kind")


def _square(size: int | Sequence[int], name: str, what: str) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise ValueError(f"{name}: the {what} {height}x{width} is not square; transformers cannot place its positions")
    return int(height)
