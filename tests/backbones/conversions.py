"""Small models of every kind that can be converted, for the tests of conversion and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from torch import Tensor

import regista
from regista.backbones.base import Backbone
from regista.backbones.positions import TRANSFORMERS
from regista.backbones.timm import TimmBackbone
from tests.backbones.probes import randomise

WIDTH, DEPTH, HEADS, SIDE, PATCH = 64, 3, 4, 56, 14
NATIVE, OTHER = (56, 56), (84, 70)
TOLERANCE = 1e-5


def timm_backbone(name: str, **arguments: Any) -> TimmBackbone:
    small = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "img_size": SIDE, "patch_size": PATCH}
    return TimmBackbone(randomise(timm.create_model(name, pretrained=False, **{**small, **arguments})), name=name)


def with_positions_of_transformers(backbone: TimmBackbone) -> TimmBackbone:
    backbone.positions = TRANSFORMERS
    return backbone


# The variants of VisionTransformer and Eva that transformers can hold.
TIMM: Mapping[str, Callable[[], TimmBackbone]] = {
    "cls and 4 registers": lambda: timm_backbone("vit_small_patch14_reg4_dinov2"),
    "registers with positions": lambda: timm_backbone("vit_small_patch14_reg4_dinov2", no_embed_class=False),
    "no registers, no layer scale": lambda: timm_backbone("vit_small_patch16_224", num_classes=3),
    "no registers": lambda: timm_backbone("vit_small_patch14_dinov2"),
    "dinov2": lambda: with_positions_of_transformers(timm_backbone("vit_small_patch14_dinov2")),
    "no cls, 4 registers": lambda: timm_backbone("vit_medium_patch16_reg4_gap_256"),
    "no cls, 4 registers with positions": lambda: timm_backbone("vit_so150m_patch16_reg4_gap_256", mlp_ratio=4),
    "no cls, 1 register": lambda: timm_backbone("vit_medium_patch16_reg1_gap_256"),
    "swiglu": lambda: timm_backbone("vit_giant_patch14_reg4_dinov2", mlp_ratio=5.5),
    "no biases": lambda: timm_backbone("vit_small_patch14_reg4_dinov2", qkv_bias=False, proj_bias=False),
    "clip's eps": lambda: timm_backbone("vit_base_patch16_clip_224", pre_norm=False),
    "dinov3": lambda: timm_backbone("vit_small_patch16_dinov3"),
    "dinov3 with biases": lambda: timm_backbone("vit_small_patch16_dinov3_qkvb"),
    "dinov3 gated": lambda: timm_backbone("vit_small_plus_patch16_dinov3", rope_temperature=50.0),
}


def of_transformers(kind: str, **options: Any) -> Backbone:
    """A random model of a transformers family ("Dinov2", "Dinov2WithRegisters", "DINOv3ViT" or "ViT")."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    sizes |= {"image_size": SIDE, "patch_size": PATCH}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    return regista.load(randomise(getattr(transformers, f"{kind}Model")(config)))


HF: Mapping[str, Callable[[], Backbone]] = {
    "dinov2": lambda: of_transformers("Dinov2"),
    "dinov2 swiglu": lambda: of_transformers("Dinov2", use_swiglu_ffn=True),
    "4 registers": lambda: of_transformers("Dinov2WithRegisters"),
    "2 registers, swiglu": lambda: of_transformers("Dinov2WithRegisters", num_register_tokens=2, use_swiglu_ffn=True),
    "0 registers": lambda: of_transformers("Dinov2WithRegisters", num_register_tokens=0, qkv_bias=False),
    "dinov3": lambda: of_transformers("DINOv3ViT", num_register_tokens=4, intermediate_size=200),
    "dinov3 gated": lambda: of_transformers(
        "DINOv3ViT", num_register_tokens=4, use_gated_mlp=True, hidden_act="silu", intermediate_size=200
    ),
    "dinov3 without biases": lambda: of_transformers(
        "DINOv3ViT", query_bias=False, value_bias=False, intermediate_size=128
    ),
    "vit": lambda: of_transformers("ViT", layer_norm_eps=1e-6, intermediate_size=200),
}


def noise(size: tuple[int, int] = NATIVE, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(3))


def largest_difference(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    assert wanted.std() > 0.1
    return float((got - wanted).detach().abs().max())


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)
