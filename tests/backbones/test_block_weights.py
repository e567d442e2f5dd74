"""A block computed again from its parts, head by head, against the block itself, in every library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regista.backbones.base import Backbone, evaluation_mode
from regista.backbones.block_weights import BlockParts, block_parts
from regista.backbones.live import from_module
from tests.backbones.probes import close, pictures, randomise


def timm_model(architecture: str, **config: Any) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_timm").named(architecture, **config)()


def timm_plain(**config: Any) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_timm").plain(**config)()


def hub(variant: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_dinov2_hub").hub(variant)


def hugging_face(variant: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_transformers").MODELS[variant]()


def open_clip(variant: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_open_clip").model(variant)


def torchvision(variant: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("tests.backbones.test_torchvision").model(variant)


MODELS: dict[str, Callable[[], Any]] = {
    "timm": timm_model("vit_small_patch16_224", img_size=64),
    "timm dinov2": timm_model("vit_small_patch14_reg4_dinov2", img_size=56),
    "timm swiglu": timm_model("vit_giant_patch14_reg4_dinov2", img_size=56),
    "timm q and k norms": timm_plain(qk_norm=True, scale_attn_norm=True, init_values=0.5),
    "timm no biases": timm_plain(qkv_bias=False, proj_bias=False),
    "timm eva": timm_model("eva02_tiny_patch14_224", img_size=56),
    "timm eva inner norm": timm_model("eva02_base_patch16_clip_224", img_size=64),
    "timm dinov3": timm_model("vit_small_plus_patch16_dinov3", img_size=64),
    "timm dinov3 biases": timm_model("vit_small_patch16_dinov3_qkvb", img_size=64),
    "hub": hub("four registers"),
    "hub swiglu": hub("gated"),
    "hub chunked": hub("chunked"),
    "hub xformers": hub("xformers"),
    "hf dinov2": hugging_face("dinov2"),
    "hf dinov2 swiglu": hugging_face("dinov2 swiglu"),
    "hf registers": hugging_face("registers 4"),
    "hf dinov3": hugging_face("dinov3 4"),
    "hf dinov3 gated": hugging_face("dinov3 1 gated"),
    "hf vit": hugging_face("vit"),
    "hf clip": hugging_face("clip"),
    "hf siglip": hugging_face("siglip"),
    "open_clip": open_clip("plain"),
    "open_clip layer scale": open_clip("no norm before"),
    "open_clip own attention": open_clip("own attention"),
    "torchvision": torchvision("patch 14"),
    "torchvision odd heads": torchvision("odd heads"),
}
ROTATED = ("timm eva", "timm eva inner norm", "timm dinov3", "timm dinov3 biases", "hf dinov3", "hf dinov3 gated")
UNSUPPORTED = {
    "side by side": (timm_model("vit_pwee_patch16_reg1_gap_256", img_size=64), "side by side"),
    "grouped": (timm_model("vit_base_patch16_sapiens2", img_size=64, num_heads=4, num_kv_heads=(2, 2, 4)), "grouped"),
    "gate": (timm_plain(), "a gate"),
    "norm behind": (open_clip("own attention with norms"), "norm behind"),
    "scaled heads": (open_clip("own attention, scaled heads"), "scaled heads"),
}


def load(make: Callable[[], Any], name: str) -> Backbone:
    double = name not in ROTATED  # their angles stay float32
    return from_module(randomise(make()), name=name).to(dtype=torch.float64 if double else None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T + (0 if bias is None else bias)


def computed(parts: BlockParts, x: Tensor, rotated: Tensor | None = None) -> Tensor:
    """The block on (N, D), one head after the other; ``rotated`` are probabilities (H, N, N) to take instead."""
    normed = parts.norm1(x)
    q, k, v = (
        linear(normed, weight, bias).chunk(parts.num_heads, -1)
        for weight, bias in (
            (parts.q_weight, parts.q_bias),
            (parts.k_weight, parts.k_bias),
            (parts.v_weight, parts.v_bias),
        )
    )
    heads = []
    for head in range(parts.num_heads):
        query = q[head] if parts.q_norm is None else parts.q_norm(q[head])
        key = k[head] if parts.k_norm is None else parts.k_norm(k[head])
        logits = query @ key.T / query.shape[-1] ** 0.5
        heads.append((logits.softmax(-1) if rotated is None else rotated[head]) @ v[head])
    joined = torch.cat(heads, -1)
    joined = joined if parts.inner_norm is None else parts.inner_norm(joined)
    x = x + linear(joined, parts.out_weight, parts.out_bias) * (1 if parts.gamma1 is None else parts.gamma1)
    return x + parts.mlp(parts.norm2(x)) * (1 if parts.gamma2 is None else parts.gamma2)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_parts_make_the_block(name: str) -> None:
    backbone = load(MODELS[name], name)
    sites = ["blocks.0.resid", "blocks.1.resid", "blocks.1.attn"]
    found = backbone(pictures(backbone), capture=sites).captured
    parts = block_parts(backbone, 1)
    with evaluation_mode(backbone.module):
        for image in range(2):
            tokens, wanted, attention = (found[site][image] for site in sites)
            got = computed(parts, tokens, attention if name in ROTATED else None)
            close(got, wanted, 1e-5)
            assert (wanted - tokens).abs().max() > 1e-2


def test_parts_are_the_modules_own() -> None:
    """What is written into a part is what the model computes with."""
    backbone = load(MODELS["timm dinov2"], "timm")
    images = pictures(backbone)
    before = backbone(images).tokens
    parts = block_parts(backbone, 0)
    with torch.no_grad():
        parts.v_weight.mul_(2)
    assert (backbone(images).tokens - before).abs().max() > 1e-3


def test_eva_has_no_key_bias() -> None:
    backbone = load(MODELS["hf dinov3"], "hf")
    assert block_parts(backbone, 0).k_bias is None


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_blocks_are_refused(name: str) -> None:
    make, words = UNSUPPORTED[name]
    backbone = load(make, name)
    if name == "gate":
        attention: Any = backbone.block_sites()[0].attn
        attention.gate = torch.nn.Linear(48, 48)
    with pytest.raises(ValueError, match=words):
        block_parts(backbone, 0)


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_is_not_there(block: int) -> None:
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        block_parts(load(MODELS["timm"], "timm"), block)
