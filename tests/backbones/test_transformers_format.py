"""timm's models in transformers' classes: the same tokens at any size, and through folders of both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import regista
from regista.backbones.plain_weights import normed_tokens
from regista.backbones.positions import DINOV2_HUB
from regista.backbones.positions import TIMM as TIMM_WAY
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.saving import save_pretrained
from regista.backbones.timm import TimmBackbone
from regista.backbones.timm_conversion import as_timm_backbone
from regista.backbones.tiny import tiny_vit
from tests.backbones.conversions import (
    NATIVE,
    OTHER,
    TIMM,
    TOLERANCE,
    largest_difference,
    noise,
    same_tensors,
    timm_backbone,
)
from tests.backbones.dinov2_module import DinoVisionTransformer
from tests.backbones.probes import randomise

transformers = pytest.importorskip("transformers")
from regista.backbones.transformers_format import to_transformers  # noqa: E402

# Round trips that change tensors and no token: positions folded into tokens, a register for CLS, heads left out,
# layer scales of one and zero biases where there were none.
FOLDED = ("registers with positions", "no registers, no layer scale", "no biases", "clip's eps")


def wanted_tokens(backbone: TimmBackbone, size: tuple[int, int]) -> Tensor:
    """By bare timm, its last norm applied to every token."""
    vit: Any = backbone.vit
    with torch.no_grad():
        tokens: Tensor = vit.forward_features(noise(size)) if size == NATIVE else backbone(noise(size)).tokens
        if isinstance(vit.norm, nn.Identity):
            tokens = vit.fc_norm(tokens)
    return tokens


@pytest.mark.parametrize("size", [NATIVE, OTHER])
@pytest.mark.parametrize("variant", TIMM)
def test_the_tokens_are_the_same(variant: str, size: tuple[int, int]) -> None:
    backbone = TIMM[variant]()
    result = to_transformers(backbone)
    model: Any = result.module
    with torch.no_grad():
        found = model(noise(size)).last_hidden_state
    assert largest_difference(found, wanted_tokens(backbone, size)) <= TOLERANCE
    layout, before = result.layout(size), backbone.layout(size)
    assert layout.slice("patches") == before.slice("patches")
    assert torch.equal(result(noise(size)).patches, layout.take(found, "patches"))
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())


@pytest.mark.parametrize("variant", TIMM)
def test_every_block_is_the_same(variant: str) -> None:
    backbone = TIMM[variant]()
    result = to_transformers(backbone)
    sites = [
        f"blocks.{block}.{part}" for block in range(backbone.depth) for part in ("resid", "attn", "k", "mlp_hidden")
    ]
    before, after = (model(noise(), capture=sites).captured for model in (backbone, result))
    for site in sites:
        torch.testing.assert_close(after[site], before[site], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("variant", TIMM)
def test_auto_model_reads_it_and_back_in_timm_it_is_the_same(variant: str, tmp_path: Path) -> None:
    backbone = TIMM[variant]()
    result = to_transformers(backbone)
    save_pretrained(result, tmp_path / "hf")
    bare, info = transformers.AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same_tensors(bare.state_dict(), result.module.state_dict())
    again = as_timm_backbone(regista.load(tmp_path / "hf"))
    save_pretrained(again, tmp_path / "timm")
    built: Any = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        found = built.forward_features(noise())
    assert largest_difference(found, wanted_tokens(backbone, NATIVE)) <= TOLERANCE
    if variant not in FOLDED and not variant.startswith("no cls"):
        assert same_tensors(built.state_dict(), backbone.vit.state_dict())
    if variant != "registers with positions":
        assert same_tensors(to_transformers(again).module.state_dict(), bare.state_dict())


def test_the_comparison_can_fail() -> None:
    backbone = TIMM["cls and 4 registers"]()
    result = to_transformers(backbone)
    attention: Any = result.block_sites()[1].attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
    assert largest_difference(result(noise()).tokens, wanted_tokens(backbone, NATIVE)) > 0.1


def test_what_is_stored_where() -> None:
    backbone = TIMM["registers with positions"]()
    vit, hf = backbone.vit, to_transformers(backbone).module.state_dict()
    cls, registers, patches = torch.split(vit.pos_embed.detach(), [1, 4, 16], 1)
    assert torch.equal(hf["embeddings.cls_token"], vit.cls_token)
    assert torch.equal(hf["embeddings.register_tokens"], vit.reg_token + registers)
    assert torch.equal(hf["embeddings.position_embeddings"], torch.cat([cls, patches], 1))
    assert not hf["embeddings.mask_token"].any()
    without = to_transformers(TIMM["no registers, no layer scale"]()).module.state_dict()
    assert without["embeddings.register_tokens"].shape == (1, 0, 64)
    assert without["encoder.layer.0.layer_scale1.lambda1"].eq(1).all()


def test_a_model_without_cls_says_what_its_cls_is() -> None:
    backbone = TIMM["no cls, 4 registers"]()
    result = to_transformers(backbone)
    assert (result.num_cls_tokens, result.num_register_tokens) == (1, 3)
    assert any("first register" in note and "token 4" in note for note in result.notes)
    features = result(noise())
    before = normed_tokens(backbone, backbone(noise()).tokens)
    first, *_ = backbone.layout().take(before, "registers").unbind(1)
    assert features.cls is not None
    torch.testing.assert_close(features.cls, first, rtol=TOLERANCE, atol=TOLERANCE)
    assert any("fc_norm" in note for note in result.notes)


def test_families_can_be_asked_for() -> None:
    plain = TIMM["no registers"]()
    assert type(to_transformers(plain).module) is transformers.Dinov2WithRegistersModel
    asked = to_transformers(plain, family="dinov2")
    assert type(asked.module) is transformers.Dinov2Model
    assert any("56x56" in note and "without antialiasing" in note for note in asked.notes)
    assert largest_difference(asked(noise()).tokens, plain(noise()).tokens) <= TOLERANCE
    assert largest_difference(asked(noise(OTHER)).tokens, plain(noise(OTHER)).tokens) > 1e-3  # as the note says
    assert type(to_transformers(TIMM["dinov2"]()).module) is transformers.Dinov2Model
    for variant, family in (("swiglu", "dinov2"), ("swiglu", "dinov3_vit"), ("dinov3", "dinov2_with_registers")):
        with pytest.raises(ValueError, match=family):
            to_transformers(TIMM[variant](), family=family)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of auto"):
        to_transformers(plain, family="vit")  # type: ignore[arg-type]


@pytest.mark.parametrize("mlp", ["mlp", "swiglu"])
@pytest.mark.parametrize("registers", [0, 4])
def test_the_hubs_own_modules(registers: int, mlp: str) -> None:
    resize = "antialiased size" if registers else "size"
    module = DinoVisionTransformer(registers=registers, mlp=mlp, resize=resize, width=64, heads=4)
    for block in module.blocks:  # the test module's SwiGLU is of two thirds of twice the width; the hub's of four times
        if mlp == "swiglu":
            block.mlp.w12, block.mlp.w3 = nn.Linear(64, 2 * 176), nn.Linear(176, 64)  # type: ignore[union-attr]
    backbone = regista.load(randomise(module))
    result = to_transformers(backbone)
    sizes = [NATIVE, OTHER] if registers else [NATIVE]
    for size in sizes:
        assert largest_difference(result(noise(size)).tokens, backbone(noise(size)).tokens) <= TOLERANCE
    assert type(result.module).__name__ == ("Dinov2WithRegistersModel" if registers else "Dinov2Model")
    assert any("offset 0.1" in note for note in result.notes) is not bool(registers)


def test_half_precision_comes_out_in_float32_and_facts_are_kept() -> None:
    backbone = TIMM["cls and 4 registers"]().to(dtype=torch.bfloat16)
    backbone.mean, backbone.std, backbone.image_size = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (98, 84)
    result = to_transformers(backbone)
    assert result.dtype == torch.float32
    assert (result.mean, result.std, result.image_size) == (backbone.mean, backbone.std, (98, 84))
    backbone.to(dtype=torch.float32)
    assert largest_difference(result(noise()).tokens, backbone(noise()).tokens) <= TOLERANCE
    with torch.no_grad():  # nothing is shared
        result.module.layernorm.weight.zero_()  # type: ignore[union-attr,operator]
    assert backbone.vit.norm.weight.any()
    assert to_transformers(result) is result


def change(path: str, value: Any) -> Any:
    def apply(backbone: TimmBackbone) -> None:
        parent, _, name = path.rpartition(".")
        setattr(backbone.vit.get_submodule(parent), name, value)

    return apply


REFUSED = {
    "pre_norm": (lambda: timm_backbone("vit_base_patch16_clip_224"), None),
    "qk_norm": (lambda: timm_backbone("vit_small_patch16_224", qk_norm=True), None),
    "norms or gates": (lambda: timm_backbone("vit_small_patch16_224", scale_attn_norm=True), None),
    "mlp_ratio is an integer": (lambda: timm_backbone("vit_small_patch16_224", mlp_ratio=3.7), None),
    "two thirds": (lambda: timm_backbone("vit_giant_patch14_reg4_dinov2", mlp_ratio=4.1), None),
    "square": (lambda: timm_backbone("vit_small_patch16_224", img_size=(56, 84)), None),
    "neither CLS nor registers": (lambda: tiny_vit(class_token=False), None),
    "QuickGELU": (lambda: timm_backbone("vit_base_patch16_clip_quickgelu_224", pre_norm=False), None),
    "exact GELU": (tiny_vit, change("blocks.1.mlp.act", nn.GELU("tanh"))),
    r"eps \[1e-06, 0.001\]": (tiny_vit, change("blocks.0.norm1.eps", 1e-3)),
    "no position table": (lambda: timm_backbone("vit_small_patch16_224", pos_embed="none"), None),
    "DINOv3's RoPE": (lambda: timm_backbone("eva02_tiny_patch14_224"), None),
    "VisionTransformerDistilled": (lambda: timm_backbone("deit_tiny_distilled_patch16_224"), None),
    r"loaded 79 of 80 tensors.*encoder.layer.0.norm1.bias": (tiny_vit, change("blocks.0.norm1.bias", None)),
    "unexpected 1: extra.weight": (tiny_vit, change("extra", nn.Linear(1, 1, bias=False))),
}


@pytest.mark.parametrize("wanted", REFUSED)
def test_what_cannot_be_said_is_refused(wanted: str) -> None:
    make, how = REFUSED[wanted]
    backbone = make()
    if how is not None:
        how(backbone)
    with pytest.raises(ValueError, match=wanted):
        to_transformers(backbone)


def test_more_than_weights_is_refused() -> None:
    backbone = tiny_vit(num_register_tokens=1)
    with backbone.editing({"blocks.0.resid": lambda x: x}), pytest.raises(ValueError, match="edits"):
        to_transformers(backbone)
    backbone.add(RegisterNeurons({0: [1]}, prefix_segments(backbone.layout()), 0))
    with pytest.raises(ValueError, match=r"act through a hook.*needs Regista: save_pretrained"):
        to_transformers(backbone)


def test_the_hubs_offset_is_told() -> None:
    backbone = TIMM["no registers"]()
    backbone.positions = DINOV2_HUB
    result = to_transformers(backbone)
    assert type(result.module) is transformers.Dinov2Model
    assert any("offset 0.1" in note for note in result.notes)
    assert backbone.positions != TIMM_WAY


def test_planted_outliers_keep_their_truth() -> None:
    backbone = regista.load("tiny-planted")
    result = to_transformers(backbone)
    images = noise(backbone.image_size)
    assert backbone.planted is not None
    assert result.planted is not None
    wanted = backbone.planted.mask(images)
    assert wanted.any()
    assert torch.equal(result.planted.mask(images), wanted)
