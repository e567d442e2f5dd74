"""Models of transformers and torch.hub in timm's classes: the same tokens at any size, and through timm's folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import regista
from regista.backbones.base import Backbone
from regista.backbones.positions import DINOV2_HUB, TIMM, TRANSFORMERS, PositionResize
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.saving import save_pretrained
from regista.backbones.timm_conversion import as_timm_backbone
from tests.backbones.conversions import HF, NATIVE, OTHER, TOLERANCE, largest_difference, noise, of_transformers
from tests.backbones.dinov2_module import DinoVisionTransformer
from tests.backbones.probes import randomise


def bare(backbone: Backbone, folder: Path) -> Any:
    save_pretrained(backbone, folder)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("variant", HF)
def test_transformers_models(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = HF[variant]()
    result = as_timm_backbone(source)
    for size in (NATIVE, OTHER):
        assert result.layout(size) == source.layout(size)
        assert largest_difference(result(noise(size)).tokens, source(noise(size)).tokens) <= TOLERANCE
    module = bare(result, tmp_path)
    with torch.no_grad():
        assert largest_difference(module.forward_features(noise()), source(noise()).tokens) <= TOLERANCE
    again = regista.load(tmp_path)
    assert largest_difference(again(noise(OTHER)).tokens, source(noise(OTHER)).tokens) <= TOLERANCE
    without_registers = variant in ("dinov2", "dinov2 swiglu", "vit")
    assert result.positions == (TRANSFORMERS if without_registers else TIMM)
    assert any("bare timm resizes" in note for note in result.notes) is without_registers
    assert any("(100 %)" in note for note in result.notes)


def test_the_comparison_can_fail() -> None:
    pytest.importorskip("transformers")
    source = HF["4 registers"]()
    result = as_timm_backbone(source)
    weight = result.vit.blocks[1].attn.qkv.weight
    with torch.no_grad():
        q, k, v = weight.detach().clone().chunk(3)
        weight.copy_(torch.cat([q, v, k]))
    assert largest_difference(result(noise()).tokens, source(noise()).tokens) > 0.1


def hub(registers: int = 0, **options: Any) -> Any:
    resize = "antialiased size" if registers else "offset"
    return randomise(DinoVisionTransformer(registers=registers, resize=resize, **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"registers": 4}, {"registers": 1, "mlp": "swiglu"}, {"mlp": "xformers"}, {"chunks": 2, "depth": 4}],
    ids=str,
)
def test_hub_models(options: dict[str, Any], tmp_path: Path) -> None:
    source = regista.load(hub(**options))
    result = as_timm_backbone(source)
    for size in (NATIVE, OTHER):
        assert largest_difference(result(noise(size)).tokens, source(noise(size)).tokens) <= TOLERANCE
    module = bare(result, tmp_path)
    with torch.no_grad():
        assert largest_difference(module.forward_features(noise()), source(noise()).tokens) <= TOLERANCE
    assert result.num_register_tokens == options.get("registers", 0)
    assert result.positions == (TIMM if options.get("registers") else DINOV2_HUB)


def test_the_hub_modules_own_settings_of_resizing_are_heeded() -> None:
    module = DinoVisionTransformer(resize="antialiased size")
    module.interpolate_antialias, module.interpolate_offset = True, 0.0  # type: ignore[assignment]
    source = regista.load(randomise(module))
    result = as_timm_backbone(source)
    assert result.positions == PositionResize(antialias=True)
    assert largest_difference(result(noise(OTHER)).tokens, source(noise(OTHER)).tokens) <= TOLERANCE


def test_facts_are_kept_and_nothing_is_shared() -> None:
    pytest.importorskip("transformers")
    source = HF["4 registers"]()
    source.mean, source.std, source.image_size = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (98, 84)
    source.to(dtype=torch.bfloat16)
    result = as_timm_backbone(source)
    assert (result.mean, result.std, result.image_size) == (source.mean, source.std, (98, 84))
    assert result.dtype == torch.float32
    result.vit.norm.weight.data.zero_()
    assert source.module.layernorm.weight.any()  # type: ignore[union-attr,operator]
    assert as_timm_backbone(result) is result


def test_a_tiny_eps_becomes_timms_and_is_told() -> None:
    pytest.importorskip("transformers")
    source = of_transformers("ViT", intermediate_size=128)  # 1e-12
    result = as_timm_backbone(source)
    assert any("1e-12" in note and "1e-06" in note for note in result.notes)
    assert 0 < largest_difference(result(noise()).tokens, source(noise()).tokens) < 1e-3


def test_a_classifier_loses_its_head_and_says_so() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    config = transformers.ViTConfig(**sizes, layer_norm_eps=1e-6, intermediate_size=128)
    source = regista.load(randomise(transformers.ViTForImageClassification(config)))
    result = as_timm_backbone(source)
    assert any("the head is left out" in note for note in result.notes)
    assert largest_difference(result(noise()).tokens, source(noise()).tokens) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("ViT", {"hidden_act": "relu"}, "activation 'relu'"),
        ("ViT", {"layer_norm_eps": 1e-3}, "eps 0.001"),
        ("DINOv3ViT", {"layer_norm_eps": 1e-6}, "wanted 1e-05"),
        ("DINOv3ViT", {"use_gated_mlp": True, "hidden_act": "gelu"}, "'silu' is what can be built"),
        ("DINOv3ViT", {"mlp_bias": False}, "without bias"),
        ("CLIPVision", {}, "CLIPVisionModel of transformers; only"),
    ],
)
def test_what_timm_has_no_place_for_is_refused(kind: str, options: dict[str, Any], wanted: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=wanted):
        as_timm_backbone(of_transformers(kind, intermediate_size=128, **options))


def test_what_is_not_whole_or_more_than_weights_is_refused() -> None:
    module = hub(4)
    source = regista.load(module)
    module.blocks[1].norm2 = nn.LayerNorm(48, eps=1e-6, bias=False)
    with pytest.raises(ValueError, match=r"loaded 34 of 35 tensors .*missing 1: blocks.1.norm2.bias"):
        as_timm_backbone(source)
    source.add(RegisterNeurons({0: [1]}, prefix_segments(source.layout()), 0))
    with pytest.raises(ValueError, match="act through a hook"):
        as_timm_backbone(source)
