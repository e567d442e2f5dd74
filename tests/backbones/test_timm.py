"""timm's VisionTransformer and Eva under the backbone contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.timm import TimmBackbone
from tests.backbones.contract import BackboneContract
from tests.backbones.probes import close, pictures, randomise

SMALL: dict[str, Any] = {"pretrained": False, "num_classes": 0, "depth": 3, "embed_dim": 48, "num_heads": 3}


def named(architecture: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(architecture, **{**SMALL, **config})


def plain(**config: Any) -> Callable[[], nn.Module]:
    return lambda: VisionTransformer(img_size=56, patch_size=14, num_classes=0, embed_dim=48, depth=3, num_heads=3, **config)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "vit_small_patch16_224": named("vit_small_patch16_224", img_size=64),
    "deit3_small_patch16_224": named("deit3_small_patch16_224", img_size=64),
    "deit_small_distilled_patch16_224": named("deit_small_distilled_patch16_224", img_size=64),
    "vit_small_patch14_dinov2": named("vit_small_patch14_dinov2", img_size=56),
    "vit_small_patch14_reg4_dinov2": named("vit_small_patch14_reg4_dinov2", img_size=56),
    "vit_giant_patch14_reg4_dinov2": named("vit_giant_patch14_reg4_dinov2", img_size=56),
    "vit_medium_patch16_reg4_gap_256": named("vit_medium_patch16_reg4_gap_256", img_size=64),
    "vit_betwixt_patch16_rope_reg4_gap_256": named("vit_betwixt_patch16_rope_reg4_gap_256", img_size=64),
    "vit_so150m_patch16_reg4_map_256": named("vit_so150m_patch16_reg4_map_256", img_size=64),
    "vit_small_patch16_dinov3": named("vit_small_patch16_dinov3", img_size=64),
    "vit_small_plus_patch16_dinov3": named("vit_small_plus_patch16_dinov3", img_size=64),
    "vit_small_patch16_dinov3_qkvb": named("vit_small_patch16_dinov3_qkvb", img_size=64),
    "vit_base_patch16_siglip_224": named("vit_base_patch16_siglip_224", img_size=64),
    "vit_base_patch16_siglip_gap_224": named("vit_base_patch16_siglip_gap_224", img_size=64),
    "vit_base_patch16_clip_224": named("vit_base_patch16_clip_224", img_size=64),
    "vit_base_patch16_clip_quickgelu_224": named("vit_base_patch16_clip_quickgelu_224", img_size=64),
    "eva02_tiny_patch14_224": named("eva02_tiny_patch14_224", img_size=56),
    "eva02_base_patch16_clip_224": named("eva02_base_patch16_clip_224", img_size=64),
    "vit_small_patch16_rope_224": named("vit_small_patch16_rope_224", img_size=64),
    "vit_small_patch16_rope_mixed_224": named("vit_small_patch16_rope_mixed_224", img_size=64),
    "vit_small_patch16_rope_mixed_ape_224": named("vit_small_patch16_rope_mixed_ape_224", img_size=64),
    "one register": plain(reg_tokens=1),
    "one register, no embed_class": plain(reg_tokens=1, no_embed_class=True),
    "four registers without CLS": plain(reg_tokens=4, class_token=False, global_pool="avg"),
    "no prefix": plain(class_token=False, global_pool="avg"),
    "wide grid": lambda: VisionTransformer(
        img_size=(56, 84), patch_size=14, num_classes=0, embed_dim=48, depth=3, num_heads=3
    ),
    "q and k norms": plain(qk_norm=True, init_values=0.5),
}


class TestTimm(BackboneContract):
    variants: ClassVar = (*ARCHITECTURES, "unfused", "no position table")

    def make(self, variant: str) -> Backbone:
        if variant == "unfused":
            module = named("vit_small_patch14_reg4_dinov2", img_size=56)()
            for block in module.blocks:
                block.attn.fused_attn = False
        elif variant == "no position table":
            module = plain(pos_embed="none")()
        else:
            module = ARCHITECTURES[variant]()
        return TimmBackbone(randomise(module), name=variant)

    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        module: Any = upstream(backbone, images)
        tokens, last = module.forward_intermediates(
            images, indices=1, norm=True, output_fmt="NLC", return_prefix_tokens=module.num_prefix_tokens > 0
        )
        if not module.num_prefix_tokens:
            return {"patches": tokens}
        ((patches, prefix),) = last
        counts = {
            "cls": int(module.cls_token is not None),
            "extra": int(getattr(module, "dist_token", None) is not None),
            "registers": 0 if module.reg_token is None else module.reg_token.shape[1],
        }
        parts = dict(zip(counts, prefix.split(list(counts.values()), 1), strict=True))
        return {"patches": patches, **{name: part for name, part in parts.items() if counts[name]}}

    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        module: Any = upstream(backbone, images)
        attention = module.blocks[block].attn
        attention.fused_attn = False
        seen: list[Tensor] = []
        attention.attn_drop.register_forward_hook(lambda _module, _args, output: seen.append(output))
        module.forward_features(images)
        (probabilities,) = seen
        return probabilities

    def reference_global(self, backbone: Backbone, images: Tensor) -> Tensor | None:
        module: Any = upstream(backbone, images)
        if backbone.pool_attention() is None:
            return None
        return module.pool(module.forward_features(images))

    def reference_pool_attention(self, backbone: Backbone, images: Tensor) -> Tensor:
        module: Any = upstream(backbone, images)
        pool = module.attn_pool
        pool.fused_attn = False
        seen: list[Tensor] = []
        handle = pool.kv.register_forward_hook(lambda _module, _args, output: seen.append(output))
        module.pool(module.forward_features(images))
        handle.remove()
        keys, _ = seen.pop().chunk(2, -1)
        keys = pool.k_norm(keys.unflatten(-1, (pool.num_heads, -1)).transpose(1, 2))
        query = pool.q_norm(pool.q(pool.latent).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2))
        return (query @ keys.transpose(-1, -2) * pool.scale).softmax(-1)

    def has_final_norm(self, backbone: Backbone) -> bool:
        return not isinstance(backbone.module.norm, nn.Identity)

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        table: nn.Parameter | None = backbone.module.pos_embed
        return table


def upstream(backbone: Backbone, images: Tensor) -> nn.Module:
    """A copy of the module brought to the image size by timm itself."""
    module: Any = copy.deepcopy(backbone.module)
    if tuple(module.patch_embed.img_size) != tuple(images.shape[-2:]):
        module.set_input_size(img_size=tuple(images.shape[-2:]))
    return module
