"""timm's VisionTransformer and Eva under the backbone contract."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.positions import TRANSFORMERS
from regista.backbones.timm import TimmBackbone
from tests.backbones.contract import BackboneContract
from tests.backbones.probes import pictures, randomise

SMALL: dict[str, Any] = {"pretrained": False, "num_classes": 0, "depth": 3, "embed_dim": 48, "num_heads": 3}


def named(architecture: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(architecture, **{**SMALL, **config})


def plain(**config: Any) -> Callable[[], nn.Module]:
    return lambda: VisionTransformer(
        img_size=56, patch_size=14, num_classes=0, embed_dim=48, depth=3, num_heads=3, **config
    )


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
    "vit_pwee_patch16_reg1_gap_256": named("vit_pwee_patch16_reg1_gap_256", img_size=64),
    "vit_base_patch16_sapiens2": named("vit_base_patch16_sapiens2", img_size=64, num_heads=4, num_kv_heads=(2, 2, 4)),
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
    without_place: ClassVar = ("deit_small_distilled_patch16_224",)

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
        attention = getattr(module.blocks[block], "attn", module.blocks[block])
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


DYNAMIC = {
    "embed_class": plain,
    "registers": lambda **config: plain(reg_tokens=4, no_embed_class=True, **config),
    "without CLS": lambda **config: plain(class_token=False, global_pool="avg", **config),
    "distilled": lambda **config: named("deit_small_distilled_patch16_224", img_size=64, **config),
    "eva02": lambda **config: named("eva02_base_patch16_clip_224", img_size=64, **config),
    "dinov3": lambda **config: named("vit_small_patch16_dinov3", img_size=64, **config),
    "mixed rope": lambda **config: named("vit_small_patch16_rope_mixed_ape_224", img_size=64, **config),
}


@pytest.mark.parametrize("architecture", DYNAMIC)
@pytest.mark.parametrize("grid", [(4, 4), (2, 8), (8, 2), (6, 5), (3, 3), (13, 1)])
def test_resizing_equals_timms_dynamic_size_bit_for_bit(architecture: str, grid: tuple[int, int]) -> None:
    static, dynamic = DYNAMIC[architecture]()(), DYNAMIC[architecture](dynamic_img_size=True)()
    dynamic.load_state_dict(randomise(static).state_dict())
    backbone = TimmBackbone(static, name=architecture)
    images = pictures(backbone, 1, (grid[0] * backbone.patch_size, grid[1] * backbone.patch_size))
    with torch.no_grad():
        assert torch.equal(backbone(images).tokens, dynamic.eval().forward_features(images))


def test_another_convention_changes_the_features() -> None:
    module = randomise(plain()())
    images = pictures(TimmBackbone(module, name="a"), 1)
    timms = TimmBackbone(module, name="a")(images).tokens
    others = TimmBackbone(module, name="b", positions=TRANSFORMERS)(images).tokens
    assert (timms - others).abs().max() > 1e-3
    native = pictures(TimmBackbone(module, name="a"), 1, (56, 56))
    assert torch.equal(
        TimmBackbone(module, name="a")(native).tokens,
        TimmBackbone(module, name="b", positions=TRANSFORMERS)(native).tokens,
    )


def test_private_names_of_timm_still_exist() -> None:
    eva: Any = ARCHITECTURES["eva02_base_patch16_clip_224"]()
    assert eva.rope._use_cached_embed is True
    assert TimmBackbone(eva, name="eva").attention_backend() in ("fused", "unfused")
    for name in ("strict_img_size", "dynamic_img_pad", "flatten", "output_fmt", "grid_size"):
        assert hasattr(eva.patch_embed, name)
    for name in ("dynamic_img_size", "no_embed_class", "num_prefix_tokens"):
        assert hasattr(eva, name)


def test_a_distillation_token_is_no_register() -> None:
    layout = TimmBackbone(ARCHITECTURES["deit_small_distilled_patch16_224"](), name="deit").layout((64, 64))
    assert [tuple(segment) for segment in layout.segments] == [("cls", 1), ("extra", 1), ("patches", 16)]


@pytest.mark.parametrize(("count", "variant"), [(4, "vit_small_patch16_dinov3"), (0, "vit_small_patch16_224")])
def test_registers_are_counted_in_the_weights(count: int, variant: str) -> None:
    backbone = TimmBackbone(ARCHITECTURES[variant](), name="vit_reg9")
    assert backbone.num_register_tokens == count
    assert backbone(pictures(backbone)).registers.shape == (2, count, 48)


def test_pixel_statistics_and_size_come_from_the_model() -> None:
    clip = TimmBackbone(ARCHITECTURES["vit_base_patch16_clip_224"](), name="clip")
    assert clip.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    siglip = TimmBackbone(ARCHITECTURES["vit_base_patch16_siglip_224"](), name="siglip")
    assert siglip.std == (0.5, 0.5, 0.5)
    assert TimmBackbone(ARCHITECTURES["wide grid"](), name="wide").image_size == (56, 84)


def test_training_mode_can_be_asked_for() -> None:
    module = plain(drop_path_rate=0.9, pos_drop_rate=0.5)()
    backbone = TimmBackbone(randomise(module).train(), name="train")
    images = pictures(backbone)
    assert torch.equal(backbone(images).tokens, backbone(images).tokens)
    backbone.training = True
    assert not torch.equal(backbone(images).tokens, backbone(images).tokens)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("resnet18", "ResNet is not a timm VisionTransformer or Eva"),
        ("vit_small_r26_s32_224", "patch embedding"),
        ("vit_small_patch16_18x2_224", "block 0 is a ParallelThingsBlock"),
        ("vit_dwee_patch16_reg1_gap_256", "DiffAttention"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos is not"),
    ],
)
def test_models_that_cannot_be_read_are_refused(architecture: str, message: str) -> None:
    small = {} if architecture == "resnet18" else {"depth": 1}
    module = timm.create_model(architecture, pretrained=False, **small)
    with pytest.raises(ValueError, match=message):
        TimmBackbone(module, name=architecture)
