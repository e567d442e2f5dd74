"""``inspect_backbone`` reads the live module, and its facts are plain values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import regista
from regista.backbones.features import Planted
from regista.backbones.inspection import inspect_backbone, mlp_facts
from regista.backbones.tiny import tiny_vit

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4}
HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


def create(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, **{**SMALL, **arguments})


def open_clip_model(**options: Any) -> nn.Module:
    import open_clip

    vision = {"image_size": 64, "patch_size": 16, "width": 64, "layers": 2, "head_width": 16}
    text = {"width": 32, "heads": 2, "layers": 1, "vocab_size": 10, "context_length": 5}
    return open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text, **options)


BICUBIC = "resized bicubic, antialiased"
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dinov2": (
        create("vit_small_patch14_reg4_dinov2", img_size=56),
        {
            "num_register_tokens": 4,
            "order": ["cls", "registers", "patches"],
            "mlp": "GELU",
            "mlp_hidden": 256,
            "positions": f"learned table of 4x4 cells, {BICUBIC}",
            "pooling": "CLS",
        },
    ),
    "swiglu": (
        create("vit_giant_patch14_reg4_dinov2", img_size=56, mlp_ratio=5.5),
        {"mlp": "SwiGLU", "mlp_hidden": 176},
    ),
    "gap": (
        create("vit_medium_patch16_reg4_gap_256", img_size=(64, 96)),
        {"order": ["registers", "patches"], "pooling": "mean of the patches", "grid_size": [4, 6]},
    ),
    "quickgelu": (create("vit_base_patch16_clip_quickgelu_224", img_size=64), {"mlp": "QuickGELU"}),
    "siglip": (create("vit_base_patch16_siglip_224", img_size=64), {"pooling": "attention", "order": ["patches"]}),
    "dinov3": (
        create("vit_small_plus_patch16_dinov3", img_size=64),
        {"positions": "RoPE on the patches", "mlp": "SwiGLU", "num_register_tokens": 4},
    ),
    "eva02": (
        create("eva02_tiny_patch14_224", img_size=56),
        {"positions": f"learned table of 4x4 cells and 1 more rows, {BICUBIC} and RoPE on the patches"},
    ),
    "hf dinov2": (
        lambda: transformers.Dinov2Model(transformers.Dinov2Config(**HF)),
        {"mlp": "GELU", "positions": "learned table of 4x4 cells and 1 more rows, resized by the module itself"},
    ),
    "hf swiglu": (
        lambda: transformers.Dinov2Model(transformers.Dinov2Config(**HF, use_swiglu_ffn=True)),
        {"mlp": "SwiGLU", "mlp_hidden": 176},
    ),
    "hf dinov3": (
        lambda: transformers.DINOv3ViTModel(
            transformers.DINOv3ViTConfig(**HF, intermediate_size=128, use_gated_mlp=True, hidden_act="silu")
        ),
        {"positions": "RoPE on the patches", "mlp": "SwiGLU", "mlp_hidden": 128, "num_register_tokens": 0},
    ),
    "hf clip": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**HF, intermediate_size=128)),
        {"mlp": "QuickGELU", "mlp_hidden": 128},
    ),
    "open_clip": (
        open_clip_model,
        {"mlp": "GELU", "pooling": "CLS", "positions": f"learned table of 4x4 cells and 1 more rows, {BICUBIC}"},
    ),
    "open_clip quickgelu": (lambda: open_clip_model(quick_gelu=True), {"mlp": "QuickGELU"}),
    "torchvision": (
        lambda: torchvision.models.VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128),
        {
            "mlp": "GELU",
            "mlp_hidden": 128,
            "positions": "learned table of 4x4 cells and 1 more rows, "
            "resized bicubic, not antialiased, corners aligned",
        },
    ),
}


@pytest.mark.parametrize("variant", CASES)
def test_facts_of_every_library(variant: str) -> None:
    make, wanted = CASES[variant]
    module = make()
    backbone = regista.load(module)
    facts = inspect_backbone(backbone)
    assert {key: facts[key] for key in wanted} == wanted
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["class"] == type(backbone.module).__name__
    assert facts["depth"] == 2
    assert facts["num_tokens"] == backbone.layout().num_tokens
    assert facts["parameters"] == sum(parameter.numel() for parameter in backbone.module.parameters())
    assert facts["tokens"] == str(backbone.layout())
    assert facts["planted"] is None


def test_what_was_planted_and_noted_is_told() -> None:
    backbone = tiny_vit()
    backbone.planted = Planted(2, (5, 7), torch.clone, "position")
    backbone.notes.append("read from teacher.*")
    facts = inspect_backbone(backbone)
    assert facts["planted"] == {"kind": "position", "block": 2, "neurons": [5, 7]}
    assert facts["notes"] == ["read from teacher.*"]
    assert facts["dtype"] == "float32"
    assert facts["device"] == "cpu"


def test_a_size_that_the_patch_does_not_divide() -> None:
    with pytest.raises(ValueError, match="not divisible by the patch size"):
        inspect_backbone(tiny_vit(image_size=(100, 100)))


def test_an_odd_activation_keeps_its_name() -> None:
    backbone = regista.load(create("vit_small_patch16_224", img_size=64, act_layer="relu")())
    assert mlp_facts(backbone) == ("ReLU", 256)
