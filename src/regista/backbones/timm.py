"""timm's VisionTransformer and Eva: DeiT, DINOv2, DINOv3, CLIP, SigLIP, SBB, EVA-02 ..."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from timm.data.config import resolve_model_data_config
from timm.layers.attention import Attention, AttentionRope
from timm.layers.format import Format
from timm.layers.patch_embed import PatchEmbed
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.capture import BlockSites
from regista.backbones.positions import (
    TIMM,
    PositionResize,
    resize_positions,
    swapped_attributes,
    swapped_parameter,
)
from regista.tokens import Segment, TokenLayout

ATTENTION_TYPES = (Attention, AttentionRope, EvaAttention)


class TimmBackbone(Backbone):
    """Adapter of a live timm ViT.

    Args:
        module: A ``VisionTransformer`` or ``Eva``, with CLS or none, registers or none,
            any pooling.
        name: For messages and records.
        positions: How its position table is resized; timm's own way by default.
        image_size: (height, width) for ``preprocess``; the model's native size by default.

    Raises:
        ValueError: for other classes, non-square patches, or blocks and attention of a kind
            whose insides are not one softmax attention and one MLP.
    """

    library = "timm"

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        positions: PositionResize = TIMM,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        if not isinstance(module, (VisionTransformer, Eva)):
            raise ValueError(f"{name}: {type(module).__name__} is not a timm VisionTransformer or Eva")
        _check_parts(module, name)
        vit: Any = module
        attention: Any = _sites(next(iter(vit.blocks))).attn
        data: dict[str, Any] = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
        height, width = vit.patch_embed.img_size or data["input_size"][-2:]
        super().__init__(
            module,
            name=name,
            embed_dim=vit.embed_dim,
            num_heads=int(attention.num_heads),
            patch_size=int(max(vit.patch_embed.patch_size)),
            image_size=image_size or (int(height), int(width)),
            num_register_tokens=0 if vit.reg_token is None else int(vit.reg_token.shape[1]),
            num_cls_tokens=0 if vit.cls_token is None else 1,
            mean=data["mean"],
            std=data["std"],
        )
        self.vit = vit
        self.positions = positions

    def layout(self, image_size: tuple[int, int] | None = None) -> TokenLayout:
        """[cls][distillation token][registers][patches]; see ``Backbone.layout``."""
        layout = super().layout(image_size)
        distillation = int(self.vit.num_prefix_tokens) - layout.num_prefix_tokens
        counts = {**dict(layout.segments), "extra": distillation}
        order = ("cls", "extra", "registers", "patches")
        segments = tuple(Segment(name, counts.get(name, 0)) for name in order)
        return TokenLayout(segments, layout.grid_size, layout.patch_size)

    def block_sites(self) -> Sequence[BlockSites]:
        """``block``, ``block.attn`` and ``block.mlp.fc2`` (the second layer of every timm MLP)."""
        return [_sites(block) for block in self.vit.blocks]

    def patch_projection(self) -> nn.Module | None:
        """The convolution of the patch embedding."""
        projection = self.vit.patch_embed.proj
        return projection if isinstance(projection, nn.Conv2d) else None

    def position_table(self) -> nn.Parameter | None:
        """``pos_embed``, with a row for each prefix token unless ``no_embed_class``."""
        table: nn.Parameter | None = self.vit.pos_embed
        return table

    def register_table(self) -> nn.Parameter | None:
        """``reg_token``."""
        table: nn.Parameter | None = self.vit.reg_token
        return table

    @torch.no_grad()
    def insert_registers(self, registers: Tensor) -> None:
        """Into ``reg_token``; positions of CLS and earlier registers are folded into these tokens first."""
        vit = self.vit
        if self.layout().count("extra"):
            raise ValueError(f"{self.name}: timm's distilled models have no place for registers")
        if vit.pos_embed is not None and not vit.no_embed_class:
            fold_prefix_positions(vit)
        old = registers.new_zeros(1, 0, self.embed_dim) if vit.reg_token is None else vit.reg_token
        vit.reg_token = nn.Parameter(torch.cat([old, registers.unsqueeze(0)], 1))
        vit.no_embed_class = True
        added = len(registers)
        vit.num_reg_tokens = int(vit.reg_token.shape[1])
        for part in vit.modules():  # RoPE leaves so many tokens out
            if hasattr(part, "num_prefix_tokens"):
                part.num_prefix_tokens = int(part.num_prefix_tokens) + added

    def pool_attention(self) -> nn.Module | None:
        """SigLIP's attention pooling, ``attn_pool``."""
        pool = getattr(self.vit, "attn_pool", None)
        return pool if isinstance(pool, nn.Module) and hasattr(pool, "fused_attn") else None

    def forward_tokens(self, images: Tensor) -> Tensor:
        """``forward_features``: (B, 3, H, W) -> (B, N, D)."""
        tokens: Tensor = self.vit.forward_features(images)
        return tokens

    def global_vector(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """Attention pooling where the model has it, else CLS, else the mean patch: (B, D)."""
        if self.pool_attention() is not None:
            pooled: Tensor = self.vit.pool(tokens)
            return pooled
        return super().global_vector(tokens, layout)

    @contextmanager
    def prepared(self, image_size: tuple[int, int]) -> Iterator[None]:
        """Any image size, with the position table resized in the checkpoint's convention."""
        embed = self.vit.patch_embed
        grid = (image_size[0] // self.patch_size, image_size[1] // self.patch_size)
        table = self.vit.pos_embed
        with ExitStack() as stack:
            flags = {"strict_img_size": False, "dynamic_img_pad": False, "flatten": False, "output_fmt": Format.NHWC}
            stack.enter_context(swapped_attributes(embed, **flags))
            stack.enter_context(swapped_attributes(self.vit, dynamic_img_size=True))
            if table is not None and tuple(embed.grid_size) != grid:
                prefix = 0 if self.vit.no_embed_class else int(self.vit.num_prefix_tokens)
                resized = resize_positions(
                    table, tuple(embed.grid_size), grid, num_prefix_tokens=prefix, how=self.positions
                )
                stack.enter_context(swapped_parameter(self.vit, "pos_embed", resized))
                stack.enter_context(swapped_attributes(embed, grid_size=grid))
            rope: Any = getattr(self.vit, "rope", None)
            if getattr(rope, "_use_cached_embed", False) and tuple(rope.feat_shape) != grid:
                stack.enter_context(swapped_attributes(rope, _use_cached_embed=False))
            yield

    def fused_attention(self) -> AbstractContextManager[Any]:
        """Set every ``fused_attn`` flag; given back on exit."""
        stack = ExitStack()
        for module in self.vit.modules():
            if hasattr(module, "fused_attn"):
                stack.enter_context(swapped_attributes(module, fused_attn=True))
        return stack

    def attention_backend(self) -> str:
        """By the first block's flag: "fused" (scaled_dot_product_attention) or "unfused"."""
        attention: Any = _sites(next(iter(self.vit.blocks))).attn
        return "fused" if attention.fused_attn else "unfused"


@torch.no_grad()
def fold_prefix_positions(vit: Any) -> None:
    """Add the position rows of CLS and registers to the tokens themselves, in place; the sums are the same."""
    cls, registers = int(vit.cls_token is not None), 0 if vit.reg_token is None else int(vit.reg_token.shape[1])
    counts = [cls, registers, vit.pos_embed.shape[1] - cls - registers]
    for_cls, for_registers, patches = torch.split(vit.pos_embed, counts, dim=1)
    if cls:
        vit.cls_token = nn.Parameter(vit.cls_token + for_cls, vit.cls_token.requires_grad)
    if registers:
        vit.reg_token = nn.Parameter(vit.reg_token + for_registers, vit.reg_token.requires_grad)
    vit.pos_embed = nn.Parameter(patches.clone(), vit.pos_embed.requires_grad)
    vit.no_embed_class = True


def _sites(block: Any) -> BlockSites:
    if isinstance(block, ParallelScalingBlock):  # attention and MLP side by side, in the block itself
        return BlockSites(block, block, cast(nn.Module, block.mlp_out_proj))
    return BlockSites(block, block.attn, block.mlp.fc2)


def _check_parts(module: Any, name: str) -> None:
    patch = module.patch_embed
    if not isinstance(patch, PatchEmbed) or len(set(patch.patch_size)) != 1:
        raise ValueError(f"{name}: the patch embedding must be a plain one with square patches, got {patch}")
    for index, block in enumerate(module.blocks):
        if isinstance(block, ParallelScalingBlock) and block.mlp_out_proj is not None:
            continue
        attention = getattr(block, "attn", None)
        if not isinstance(attention, ATTENTION_TYPES) or not hasattr(getattr(block, "mlp", None), "fc2"):
            raise ValueError(
                f"{name}: block {index} is a {type(block).__name__} with {type(attention).__name__}; "
                "only blocks with one softmax attention and one MLP can be looked into"
            )
