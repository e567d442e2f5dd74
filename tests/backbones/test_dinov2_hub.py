"""Hub DINOv2 modules under the backbone contract."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.dinov2_hub import Dinov2HubBackbone, is_dinov2_hub
from regista.backbones.timm import TimmBackbone
from tests.backbones.contract import BackboneContract
from tests.backbones.dinov2_module import Attention, DinoVisionTransformer
from tests.backbones.probes import close, pictures, randomise, unchanged

VARIANTS: dict[str, dict[str, Any]] = {
    "no registers": {},
    "one register": {"registers": 1, "resize": "size", "patch": 16, "side": 64},
    "four registers": {"registers": 4, "resize": "antialiased size"},
    "fused attention": {"registers": 4, "resize": "antialiased size", "attention": "fused"},
    "xformers": {"attention": "xformers", "mlp": "xformers"},
    "gated": {"mlp": "swiglu", "registers": 4, "resize": "size"},
    "chunked": {"chunks": 2, "registers": 4, "resize": "antialiased size"},
}
CLASSIFIER = "classifier around it"


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.linear_head = nn.Linear(96, 10)


def hub(variant: str = "four registers", **options: Any) -> Any:
    return randomise(DinoVisionTransformer(**{**VARIANTS.get(variant, {}), **options}))


def blocks_of(module: Any) -> list[Any]:
    return [block for block in module.modules() if type(block).__name__ == "Block"]


class TestDinov2Hub(BackboneContract):
    variants: ClassVar = (*VARIANTS, CLASSIFIER)

    def make(self, variant: str) -> Backbone:
        module = hub(variant)
        return Dinov2HubBackbone(Classifier(module) if variant == CLASSIFIER else module, name=variant)

    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        found = copy.deepcopy(backbone.module).forward_features(images)
        parts = {
            "cls": found["x_norm_clstoken"].unsqueeze(1),
            "registers": found["x_norm_regtokens"],
            "patches": found["x_norm_patchtokens"],
        }
        return {name: part for name, part in parts.items() if part.shape[1]}

    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        module = copy.deepcopy(backbone.module)
        attention = blocks_of(module)[block].attn
        inputs: list[Tensor] = []
        attention.register_forward_pre_hook(lambda _module, args: inputs.extend(args))
        module.forward_features(images)
        plain = Attention(attention.proj.out_features, attention.num_heads, nn.Dropout(0.0)).eval()
        plain.load_state_dict(attention.state_dict())
        seen: list[Tensor] = []
        plain.attn_drop.register_forward_hook(lambda _module, _args, output: seen.append(output))
        plain(*inputs)
        (probabilities,) = seen
        return probabilities

    def can_be_pickled(self, backbone: Backbone) -> bool:
        return not any(type(part).__module__.startswith("xformers") for part in backbone.module.modules())

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        table: nn.Parameter = backbone.module.pos_embed
        return table


# The same weights through timm -------------------------------------------------------------


def in_timm(module: DinoVisionTransformer) -> TimmBackbone:
    registers = module.num_register_tokens
    state = {key.replace("register_tokens", "reg_token"): value for key, value in module.state_dict().items()}
    del state["mask_token"]
    if registers:  # timm's table has no slot for CLS then
        cls, patches = state["pos_embed"].split([1, module.patch_embed.num_patches], 1)
        state |= {"cls_token": state["cls_token"] + cls, "pos_embed": patches}
    twin: Any = timm.models.VisionTransformer(
        img_size=56, patch_size=14, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, init_values=1.0, num_classes=0,
        reg_tokens=registers, no_embed_class=registers > 0,
    )  # fmt: skip
    twin.load_state_dict(state)
    return TimmBackbone(twin.eval(), name="twin")


@pytest.mark.parametrize("attention", ["by hand", "fused", "xformers"])
def test_the_same_weights_in_timm_give_the_same(attention: str) -> None:
    module = hub("four registers", attention=attention)
    backbone, twin = Dinov2HubBackbone(module, name="hub"), in_timm(module)
    for size in ((56, 56), (84, 70)):  # with registers the hub resizes as timm does
        images = pictures(backbone, size=size)
        got, wanted = backbone(images, backbone.sites()), twin(images, twin.sites())
        assert got.layout == wanted.layout
        close(got.tokens, wanted.tokens, 1e-5)
        for site in backbone.sites():
            close(got.captured[site], wanted.captured[site], 1e-5)


def test_without_registers_positions_keep_the_hubs_convention() -> None:
    module = hub("no registers")
    backbone, twin = Dinov2HubBackbone(module, name="hub"), in_timm(module)
    images = pictures(backbone, size=(56, 56))
    close(backbone(images).tokens, twin(images).tokens, 1e-5)
    images = pictures(backbone, size=(28, 42))
    tokens = backbone(images).tokens
    with torch.no_grad():
        close(tokens[:, 1:], module.forward_features(images)["x_norm_patchtokens"], 1e-5)
    assert (tokens - twin(images).tokens).abs().max() > 1e-3


# Sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["factor", "factor without check"])
def test_sizes_that_come_out_one_short_are_refused(resize: str) -> None:
    backbone = Dinov2HubBackbone(hub(side=37 * 4, patch=4, depth=2, resize=resize), name="hub")
    short = [cells for cells in range(1, 200) if math.floor(37 * (cells / 37)) != cells]
    assert short == [39, 43, 78, 86, 115, 123, 156, 172, 193]
    for cells in (39, 43, 78):
        for size in ((cells * 4, 8), (8, cells * 4)):
            with unchanged(backbone.module), pytest.raises(ValueError, match=r"cannot resize.*one patch \(4 px\)"):
                backbone(pictures(backbone, 1, size))
    for cells in (36, 37, 38, 40, 44):
        assert backbone(pictures(backbone, 1, (cells * 4, 8))).layout.grid_size == (cells, 2)


def test_the_offset_of_the_hub_gives_every_size() -> None:
    backbone = Dinov2HubBackbone(hub("no registers", side=37, patch=1, width=6, depth=1), name="hub")
    for cells in range(1, 201):
        assert backbone(pictures(backbone, 1, (cells, 1))).layout.grid_size == (cells, 1)


def test_as_many_cells_in_another_shape_are_resampled() -> None:
    backbone = Dinov2HubBackbone(hub(side=84), name="hub")
    square, wide = (
        backbone.module.interpolate_pos_encoding(torch.zeros(1, 37, 48), *size) for size in ((84, 84), (56, 126))
    )
    assert square.shape == wide.shape
    assert (square - wide).abs().max() > 0.01
    assert backbone(pictures(backbone, 1, (56, 126))).layout.grid_size == (4, 9)


# What is put in for a call is taken out again ----------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_forwards_are_those_of_the_class_again(variant: str) -> None:
    backbone = Dinov2HubBackbone(hub(variant), name=variant)
    images = pictures(backbone)

    def own() -> list[str]:
        return [path for path, module in backbone.module.named_modules() if "forward" in vars(module)]

    def fail(_x: Tensor) -> Tensor:
        assert own()
        raise KeyError("planted")

    backbone(images, backbone.sites())
    assert not own()
    with pytest.raises(KeyError):
        backbone(images, {"blocks.1.attn": fail})
    assert not own()


@pytest.mark.parametrize("attention", ["by hand", "fused", "xformers"])
def test_fused_attention_is_the_modules_own(attention: str) -> None:
    backbone = Dinov2HubBackbone(hub(attention=attention), name="hub")
    block, *_ = blocks_of(backbone.module)
    x = torch.randn(2, 9, 48)
    with torch.no_grad():
        wanted = block.attn(x)
        with backbone.fused_attention():
            close(block.attn(x), wanted, 1e-6)
            with pytest.raises(ValueError, match="cannot be captured"):
                block.attn(x, attn_bias=torch.zeros(9, 9))


def test_attention_dropout_acts_in_training_only() -> None:
    for attention in ("by hand", "fused"):
        backbone = Dinov2HubBackbone(hub(attention=attention), name="hub")
        for block in blocks_of(backbone.module):
            block.attn.attn_drop = 0.5 if attention == "fused" else nn.Dropout(0.5)
        images = pictures(backbone)
        with backbone.fused_attention():
            assert torch.equal(backbone(images).tokens, backbone(images).tokens)
            backbone.module.train()
            backbone.training = True
            assert not torch.equal(backbone(images).tokens, backbone(images).tokens)


def test_a_forward_that_somebody_else_put_in_is_kept() -> None:
    backbone = Dinov2HubBackbone(hub(), name="hub")
    first, *_ = blocks_of(backbone.module)
    first.attn.forward = lambda x: torch.zeros_like(x)
    images = pictures(backbone)
    tokens = backbone(images, ["blocks.1.attn"]).tokens
    close(tokens, backbone(images).tokens, 1e-5)
    with pytest.raises(RuntimeError, match="nothing passed through"):
        backbone(images, ["blocks.0.attn"])
    assert "forward" in vars(first.attn)


# Recognition -------------------------------------------------------------------------------


def test_what_is_a_hub_module() -> None:
    assert is_dinov2_hub(hub())
    assert is_dinov2_hub(Classifier(hub()))
    assert not is_dinov2_hub(in_timm(hub()).module)
    assert not is_dinov2_hub(nn.Linear(2, 2))
    third: Any = hub()
    del third.pos_embed  # DINOv3 of the hub: the same class name, rotary positions
    assert not is_dinov2_hub(third)
    with pytest.raises(ValueError, match=r"is not a hub DINOv2.*DINOv3 comes through"):
        Dinov2HubBackbone(third, name="dinov3")


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_registers_are_counted_in_the_weights(count: int) -> None:
    backbone = Dinov2HubBackbone(hub("no registers", registers=count), name="hub")
    assert backbone.num_register_tokens == count
    features = backbone(pictures(backbone))
    assert features.registers.shape == (2, count, 48)
    assert (backbone.depth, backbone.image_size, backbone.patch_size) == (2, (56, 56), 14)


def test_the_first_generation_knows_no_registers() -> None:
    module = hub("no registers")
    wanted = Dinov2HubBackbone(module, name="hub")(torch.ones(1, 3, 56, 56)).tokens
    del module.num_register_tokens, module.register_tokens
    found = DinoVisionTransformer.forward_features

    def forward_features(self: Any, x: Tensor, masks: Tensor | None = None) -> dict[str, Any]:
        self.num_register_tokens, self.register_tokens = 0, None
        parts = found(self, x, masks)
        del parts["x_norm_regtokens"], self.num_register_tokens, self.register_tokens
        return parts

    module.forward_features = forward_features.__get__(module)
    assert torch.equal(Dinov2HubBackbone(module, name="old")(torch.ones(1, 3, 56, 56)).tokens, wanted)


def _register_last(module: Any) -> None:
    module.num_register_tokens = 1


def _query_norm(module: Any) -> None:
    module.blocks[1].attn.q_norm = nn.LayerNorm(16)


def _wide(module: Any) -> None:
    module.patch_embed.img_size = (28, 112)


def _channels(module: Any) -> None:
    module.channel_adaptive = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_register_last, "cuts off 1 registers but has 0"),
        (_query_norm, r"block 1 has attention Attention of .*'q_norm'"),
        (_wide, r"\(28, 112\) px"),
        (_channels, "channels one by one"),
    ],
)
def test_forks_that_cannot_be_read_are_refused(change: Any, message: str) -> None:
    module = hub("no registers")
    change(module)
    with pytest.raises(ValueError, match=message):
        Dinov2HubBackbone(module, name="fork")


def test_blocks_without_an_mlp_are_refused() -> None:
    with pytest.raises(ValueError, match="and MLP Identity"):
        Dinov2HubBackbone(hub(mlp="identity"), name="no mlp")
