"""transformers' ViTs under the backbone contract, against their own eager attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from tests.backbones.contract import BackboneContract
from tests.backbones.probes import close, pictures, randomise, unchanged

transformers = pytest.importorskip("transformers")
TransformersBackbone = pytest.importorskip("regista.backbones.transformers").TransformersBackbone

SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
TEXT: dict[str, Any] = {**SMALL, "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 16}
WIDE = {"intermediate_size": 96}


def model(kind: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    values = {**SMALL, "image_size": 4 * values.get("patch_size", 14), "patch_size": 14, **values}
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**values))


def contrastive(kind: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    vision = {**SMALL, **WIDE, "image_size": 64, "patch_size": 16}
    return lambda: getattr(transformers, kind)(
        getattr(transformers, config)(vision_config=vision, text_config=TEXT, **values)
    )


def registers(**values: Any) -> Callable[[], nn.Module]:
    return model("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", mlp_ratio=2, **values)


def dinov3(**values: Any) -> Callable[[], nn.Module]:
    return model("DINOv3ViTModel", "DINOv3ViTConfig", patch_size=16, **WIDE, **values)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dinov2": model("Dinov2Model", "Dinov2Config", mlp_ratio=2),
    "dinov2 swiglu": model("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True, mlp_ratio=2),
    "dinov2 classifier": model("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2),
    "registers 0": registers(num_register_tokens=0),
    "registers 1": registers(num_register_tokens=1, patch_size=16),
    "registers 4": registers(num_register_tokens=4),
    "registers 4 swiglu": registers(num_register_tokens=4, use_swiglu_ffn=True),
    "registers classifier": model(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", mlp_ratio=2
    ),
    "dinov3 0": dinov3(),
    "dinov3 4": dinov3(num_register_tokens=4),
    "dinov3 1 gated": dinov3(num_register_tokens=1, use_gated_mlp=True, hidden_act="silu"),
    "vit": model("ViTModel", "ViTConfig", patch_size=16, **WIDE),
    "vit classifier": model("ViTForImageClassification", "ViTConfig", **WIDE),
    "clip vision": model("CLIPVisionModel", "CLIPVisionConfig", patch_size=14, **WIDE),
    "clip projection": model("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=32, **WIDE),
    "clip": contrastive("CLIPModel", "CLIPConfig", projection_dim=32),
    "clip classifier": contrastive("CLIPForImageClassification", "CLIPConfig"),
    "siglip vision": model("SiglipVisionModel", "SiglipVisionConfig", **WIDE),
    "siglip without head": model("SiglipVisionModel", "SiglipVisionConfig", vision_use_head=False, **WIDE),
    "siglip": contrastive("SiglipModel", "SiglipConfig"),
    "siglip classifier": contrastive("SiglipForImageClassification", "SiglipConfig"),
}


def upstream(backbone: Backbone) -> Any:
    """A copy of the vision tower on transformers' own unfused path."""
    module: Any = copy.deepcopy(backbone.module)
    module.set_attn_implementation("eager")
    return module


def run(backbone: Backbone, images: Tensor, **options: Any) -> Any:
    module = upstream(backbone)
    if not type(module).__name__.startswith("D"):
        options["interpolate_pos_encoding"] = True
    return module(images, **options)


class TestTransformers(BackboneContract):
    variants: ClassVar = (*MODELS, "eager")

    def make(self, variant: str) -> Backbone:
        sharp = variant.startswith("siglip")  # wide initial weights: at twice the scale rounding passes 1e-5
        module: Any = randomise(MODELS.get(variant, MODELS["registers 4"])(), scale=0.5 if sharp else 1.0)
        if variant == "eager":
            module.set_attn_implementation("eager")
        return TransformersBackbone(module, name=variant)

    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        module, output = upstream(backbone), run(backbone, images, return_dict=True)
        tokens = output.last_hidden_state
        counts = {
            "cls": 0 if type(module).__name__.startswith("Siglip") else 1,
            "registers": getattr(module.config, "num_register_tokens", 0),
        }
        counts["patches"] = tokens.shape[1] - sum(counts.values())
        if type(module).__name__.startswith("CLIP"):
            tokens = module.post_layernorm(tokens)
        parts = dict(zip(counts, tokens.split(list(counts.values()), 1), strict=True))
        if counts["cls"] and not type(module).__name__.startswith("ViT"):
            parts["cls"] = output.pooler_output.unsqueeze(1)
        return {name: part for name, part in parts.items() if part.shape[1]}

    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        attentions = run(backbone, images, return_dict=True, output_attentions=True).attentions
        assert len(attentions) == backbone.depth
        probabilities: Tensor = attentions[block]
        return probabilities

    def reference_global(self, backbone: Backbone, images: Tensor) -> Tensor | None:
        if backbone.pool_attention() is None:
            return None
        pooled: Tensor = run(backbone, images).pooler_output
        return pooled

    def reference_pool_attention(self, backbone: Backbone, images: Tensor) -> Tensor:
        head = upstream(backbone).head
        tokens = run(backbone, images).last_hidden_state
        probe = head.probe.expand(len(tokens), -1, -1)
        _, weights = head.attention(probe, tokens, tokens, need_weights=True, average_attn_weights=False)
        return weights

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        found = [p for name, p in backbone.module.named_parameters() if "position_embedding" in name]
        assert len(found) == (0 if type(backbone.module).__name__.startswith("DINOv3") else 1)
        return found.pop() if found else None


@pytest.mark.parametrize("variant", ["registers 4", "vit", "clip", "siglip", "dinov3 4"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2"])
def test_attention_is_read_whatever_the_implementation(variant: str, implementation: str) -> None:
    backbone = TransformersBackbone(randomise(MODELS[variant]()), name=variant)
    images = pictures(backbone)
    sites = ("blocks.0.attn", "blocks.2.attn_received")
    wanted = backbone(images, sites).captured
    backbone.module.config._attn_implementation = implementation
    assert backbone.attention_backend() == implementation
    with unchanged(backbone.module):
        got = backbone(images, sites).captured
    for site in sites:
        close(got[site], wanted[site], 1e-5)
    assert backbone.attention_backend() == implementation


def test_the_implementation_is_restored_after_an_exception() -> None:
    backbone = TransformersBackbone(randomise(MODELS["clip"]()), name="clip")
    backbone.full_model.set_attn_implementation("eager")

    def fail(_x: Tensor) -> Tensor:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        backbone(pictures(backbone), {"blocks.1.attn": fail})
    assert backbone.attention_backend() == "eager"
    assert backbone.full_model.text_model.config._attn_implementation == "eager"


def test_private_names_are_still_read_by_the_layers() -> None:
    """The layers look the implementation up in ``config._attn_implementation`` at each call."""
    backbone = TransformersBackbone(randomise(MODELS["dinov2"]()), name="dinov2")
    configs = {id(sites.attn.config) for sites in backbone.block_sites()}
    assert configs == {id(backbone.module.config)}
    backbone.module.config._attn_implementation = "no such attention"
    with pytest.raises((KeyError, ValueError)):
        backbone(pictures(backbone))
    assert backbone(pictures(backbone), ["blocks.0.attn"]).captured


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_registers_are_counted_in_the_weights(count: int) -> None:
    module: Any = MODELS["registers 4"]()
    module.embeddings.register_tokens = nn.Parameter(torch.randn(1, count, 48))
    backbone = TransformersBackbone(module, name="counted")
    assert backbone.num_register_tokens == count
    assert backbone(pictures(backbone)).registers.shape == (2, count, 48)


@pytest.mark.parametrize("variant", ["registers 1", "registers 4", "dinov3 4"])
def test_registers_stand_where_the_embeddings_put_them(variant: str) -> None:
    backbone = TransformersBackbone(randomise(MODELS[variant]()), name=variant)
    images = pictures(backbone, 1)
    layout = backbone.layout(tuple(images.shape[-2:]))
    embeddings: Any = backbone.module.embeddings
    assert torch.equal(layout.take(embeddings(images), "registers"), embeddings.register_tokens)


def test_clip_cls_is_the_pooled_output_and_the_text_tower_is_reachable() -> None:
    module: Any = randomise(MODELS["clip"]())
    backbone = TransformersBackbone(module, name="clip")
    images = pictures(backbone, size=(64, 64))
    features = backbone(images)
    with torch.no_grad():
        close(features.cls, module.vision_model(images).pooler_output, 1e-5)
        projected = module.visual_projection(features.cls)
        close(projected, module.get_image_features(images).pooler_output, 1e-5)
    assert backbone.full_model.text_model(torch.tensor([[1, 2, 98]])).last_hidden_state.shape == (1, 3, 48)
    backbone.to(dtype=torch.float64)
    assert module.text_projection.weight.dtype == torch.float64


def test_pixel_statistics_follow_the_family_or_the_argument() -> None:
    def stats(variant: str, **given: Any) -> tuple[Any, Any]:
        backbone = TransformersBackbone(MODELS[variant](), name=variant, **given)
        return backbone.mean, backbone.std

    assert stats("dinov3 4") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert stats("vit") == stats("siglip") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    mean, std = stats("clip")
    processor = transformers.CLIPImageProcessor()
    assert list(mean) == pytest.approx(list(processor.image_mean))
    assert list(std) == pytest.approx(list(processor.image_std))
    assert stats("clip", mean=[0.1, 0.2, 0.3], std=[1, 1, 1]) == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))


def test_other_models_and_shapes_are_refused() -> None:
    text = transformers.BertConfig(**TEXT)
    with pytest.raises(ValueError, match=r"BertModel is not one of .*DINOv3ViTModel"):
        TransformersBackbone(transformers.BertModel(text), name="bert")
    with pytest.raises(ValueError, match="56x84"):
        TransformersBackbone(model("Dinov2Model", "Dinov2Config", image_size=[56, 84])(), name="wide")
