"""Weights of other libraries in timm: the same tokens, in the library's own sizes and others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from regista.backbones.checkpoint_files import read_state_dict
from regista.backbones.key_maps import to_timm
from regista.backbones.positions import DINOV2_HUB, TIMM, TRANSFORMERS
from regista.backbones.timm import TimmBackbone
from regista.backbones.timm_files import backbone_from_file
from tests.backbones.probes import close, randomise

WIDTH, DEPTH, HEADS = 64, 3, 4
SIZES = ((56, 56), (84, 70))  # of patch 14; the native size first
TOLERANCE = 1e-5


def create(name: str, **arguments: Any) -> partial[nn.Module]:
    """A small model of a timm architecture."""
    small = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, **arguments}
    return partial(timm.create_model, name, pretrained=False, **small)


def dinov2(registers: int | None, *, swiglu: bool = False) -> Any:
    """A random Dinov2Model, or Dinov2WithRegistersModel where ``registers`` is a number."""
    options = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "use_swiglu_ffn": swiglu}
    options |= {"image_size": 56, "patch_size": 14}
    if registers is None:
        return randomise(transformers.Dinov2Model(transformers.Dinov2Config(**options)))
    config = transformers.Dinov2WithRegistersConfig(**options, num_register_tokens=registers)
    return randomise(transformers.Dinov2WithRegistersModel(config))


def dinov3(*, gated: bool = False, **biases: bool) -> Any:
    config = transformers.DINOv3ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=176 if gated else 256,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
        num_register_tokens=4,
        image_size=64,
        patch_size=16,
        **biases,
    )
    return randomise(transformers.DINOv3ViTModel(config))


def vit() -> Any:
    options = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 256}
    config = transformers.ViTConfig(**options, image_size=64, patch_size=16, layer_norm_eps=1e-6)
    return randomise(transformers.ViTModel(config, add_pooling_layer=False))


def dinov2_target(registers: int | None, *, swiglu: bool = False, **more: Any) -> partial[nn.Module]:
    size = "giant" if swiglu else "small"
    name = f"vit_{size}_patch14_dinov2" if not registers else f"vit_{size}_patch14_reg4_dinov2"
    arguments = {"mlp_ratio": 352 / WIDTH} if swiglu else {}
    return create(name, **({"reg_tokens": registers} if registers else {}), **arguments, **more)


def on_disk(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return read_state_dict(folder)


def loaded(target: partial[nn.Module], state: Mapping[str, Tensor]) -> TimmBackbone:
    return backbone_from_file(target, state, name="test", source="file")


def compare(backbone: TimmBackbone, model: Any, sizes: tuple[tuple[int, int], ...], **options: Any) -> None:
    """Tokens of ours and of the transformers model at each size."""
    for size in sizes:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = model(images, **options).last_hidden_state
        assert wanted.std() > 0.1
        close(backbone(images).tokens, wanted, TOLERANCE)


@pytest.mark.parametrize("names", ["memory", "disk"])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("registers", [None, 0, 1, 4])
def test_dinov2_of_transformers(registers: int | None, swiglu: bool, names: str, tmp_path: Path) -> None:
    model = dinov2(registers, swiglu=swiglu)
    state = model.state_dict() if names == "memory" else on_disk(model, tmp_path)
    backbone = loaded(dinov2_target(registers, swiglu=swiglu), state)
    assert backbone.image_size == (56, 56)
    assert backbone.positions == (TRANSFORMERS if registers is None else TIMM)
    assert backbone.num_register_tokens == (registers or 0)
    compare(backbone, model, SIZES)


def test_dinov2_with_registers_in_a_model_whose_registers_have_positions() -> None:
    model = dinov2(4)
    backbone = loaded(dinov2_target(4, no_embed_class=False), model.state_dict())
    assert backbone.vit.pos_embed.shape == (1, 1 + 4 + 16, WIDTH)
    compare(backbone, model, SIZES)


@pytest.mark.parametrize("names", ["memory", "disk"])
def test_vit_of_transformers(names: str, tmp_path: Path) -> None:
    model = vit()
    state = model.state_dict() if names == "memory" else on_disk(model, tmp_path)
    backbone = loaded(create("vit_tiny_patch16_224"), state)
    assert backbone.positions == TRANSFORMERS
    compare(backbone, model, ((64, 64), (96, 80)), interpolate_pos_encoding=True)


@pytest.mark.parametrize("names", ["memory", "disk"])
@pytest.mark.parametrize(
    ("gated", "biases", "target"),
    [
        (False, {}, create("vit_small_patch16_dinov3_qkvb", img_size=64)),
        (False, {"query_bias": False, "value_bias": False}, create("vit_small_patch16_dinov3", img_size=64)),
        (False, {"query_bias": False, "value_bias": False}, create("vit_small_patch16_dinov3_qkvb", img_size=64)),
        (True, {}, create("vit_small_plus_patch16_dinov3_qkvb", img_size=64, mlp_ratio=176 / WIDTH, swiglu_align_to=8)),
    ],
)
def test_dinov3_of_transformers(
    gated: bool, biases: dict[str, bool], target: partial[nn.Module], names: str, tmp_path: Path
) -> None:
    model = dinov3(gated=gated, **biases)
    state = model.state_dict() if names == "memory" else on_disk(model, tmp_path)
    backbone = loaded(target, state)
    assert backbone.num_register_tokens == 4
    compare(backbone, model, ((64, 64), (96, 80)))


def test_a_classifier_around_dinov2_is_seen_through() -> None:
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        image_size=56,
        patch_size=14,
        num_labels=5,
    )
    model: Any = randomise(transformers.Dinov2WithRegistersForImageClassification(config))
    backbone = loaded(dinov2_target(4), model.state_dict())
    compare(backbone, model.dinov2_with_registers, SIZES[:1])
    assert any("classifier" in note for note in backbone.notes)


def test_vits_classifier_is_timms_head() -> None:
    options = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 256}
    config = transformers.ViTConfig(**options, image_size=64, patch_size=16, layer_norm_eps=1e-6, num_labels=7)
    model: Any = randomise(transformers.ViTForImageClassification(config))
    state = {key.replace("vit.", "", 1): value for key, value in model.state_dict().items()}
    backbone = loaded(create("vit_tiny_patch16_224"), state)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        close(backbone.module(images), model(images).logits, TOLERANCE)


# torch.hub's names, written out by hand from a transformers model of the same function


def hub_names(model: Any) -> dict[str, Tensor]:
    """A transformers DINOv2 in the names of DINOv2's own code."""
    own = model.state_dict()
    state = {"cls_token": own["embeddings.cls_token"], "pos_embed": own["embeddings.position_embeddings"]}
    state |= {"mask_token": own["embeddings.mask_token"]}
    if "embeddings.register_tokens" in own:
        state["register_tokens"] = own["embeddings.register_tokens"]
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embeddings.projection.{kind}"]
        state[f"norm.{kind}"] = own[f"layernorm.{kind}"]
        for block in range(DEPTH):
            theirs, ours = f"encoder.layer.{block}", f"blocks.{block}"
            parts = [own[f"{theirs}.attention.{part}_proj.{kind}"] for part in "qkv"]
            state[f"{ours}.attn.qkv.{kind}"] = torch.cat(parts)
            state[f"{ours}.attn.proj.{kind}"] = own[f"{theirs}.attention.o_proj.{kind}"]
            for norm in ("norm1", "norm2"):
                state[f"{ours}.{norm}.{kind}"] = own[f"{theirs}.{norm}.{kind}"]
            if f"{theirs}.mlp.fc1.weight" in own:
                for layer in ("fc1", "fc2"):
                    state[f"{ours}.mlp.{layer}.{kind}"] = own[f"{theirs}.mlp.{layer}.{kind}"]
            else:
                gate, up = own[f"{theirs}.mlp.gate_proj.{kind}"], own[f"{theirs}.mlp.up_proj.{kind}"]
                state[f"{ours}.mlp.w12.{kind}"] = torch.cat([gate, up])
                state[f"{ours}.mlp.w3.{kind}"] = own[f"{theirs}.mlp.down_proj.{kind}"]
    for block in range(DEPTH):
        for scale in (1, 2):
            state[f"blocks.{block}.ls{scale}.gamma"] = own[f"encoder.layer.{block}.layer_scale{scale}.lambda1"]
    return state


def chunked(state: Mapping[str, Tensor], *, counted_through: bool) -> dict[str, Tensor]:
    """``blocks.i.`` as ``blocks.chunk.i.``, two blocks a chunk."""

    def place(found: re.Match[str]) -> str:
        block = int(found.group(1))
        return f"blocks.{block // 2}.{block if counted_through else block % 2}."

    return {re.sub(r"^blocks\.(\d+)\.", place, key): value for key, value in state.items()}


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("registers", [None, 4])
def test_dinov2_of_torch_hub(registers: int | None, swiglu: bool) -> None:
    model = dinov2(registers, swiglu=swiglu)
    state = hub_names(model)
    backbone = loaded(dinov2_target(registers, swiglu=swiglu), state)
    assert backbone.positions == (DINOV2_HUB if registers is None else TIMM)
    compare(backbone, model, SIZES if registers else SIZES[:1])
    without = {key: value for key, value in state.items() if key != "mask_token"}
    compare(loaded(dinov2_target(registers, swiglu=swiglu), without), model, SIZES[:1])


def test_hub_dinov2_without_registers_resizes_with_an_offset() -> None:
    model = dinov2(None)
    backbone = loaded(dinov2_target(None), hub_names(model))
    table = model.embeddings.position_embeddings
    cells = table.detach()[:, 1:].reshape(1, 4, 4, WIDTH).permute(0, 3, 1, 2)
    rows, cols = 6, 5
    factors = ((rows + 0.1) / 4, (cols + 0.1) / 4)
    resized = nn.functional.interpolate(cells, scale_factor=factors, mode="bicubic")
    assert resized.shape[-2:] == (rows, cols)
    table.data = torch.cat([table.detach()[:, :1], resized.flatten(2).transpose(1, 2)], 1)
    model.embeddings.interpolate_pos_encoding = lambda *_: table
    compare(backbone, model, ((84, 70),))


@pytest.mark.parametrize("counted_through", [True, False])
def test_chunked_blocks(counted_through: bool) -> None:
    model = dinov2(4)
    state = chunked(hub_names(model), counted_through=counted_through)
    compare(loaded(dinov2_target(4), state), model, SIZES)


@pytest.mark.parametrize("gated", [False, True])
def test_dinov3_of_torch_hub(gated: bool) -> None:
    model = dinov3(gated=gated)
    own = model.state_dict()
    state = {"cls_token": own["embeddings.cls_token"], "storage_tokens": own["embeddings.register_tokens"]}
    state |= {"mask_token": own["embeddings.mask_token"].squeeze(0), "rope_embed.periods": torch.ones(4)}
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embeddings.{kind}"]
        state[f"norm.{kind}"] = own[f"norm.{kind}"]
    names = {"fc1": "up_proj", "fc2": "down_proj"}
    names = {"w1": "gate_proj", "w2": "up_proj", "w3": "down_proj"} if gated else names
    for block in range(DEPTH):
        theirs, ours = f"model.layer.{block}", f"blocks.{block}"
        state[f"{ours}.attn.qkv.weight"] = torch.cat([own[f"{theirs}.attention.{part}_proj.weight"] for part in "qkv"])
        biases = {part: own[f"{theirs}.attention.{part}_proj.bias"] for part in "qv"}
        state[f"{ours}.attn.qkv.bias"] = torch.cat([biases["q"], torch.full((WIDTH,), 3.0), biases["v"]])
        state[f"{ours}.attn.qkv.bias_mask"] = torch.cat([torch.ones(WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)])
        for kind in ("weight", "bias"):
            state[f"{ours}.attn.proj.{kind}"] = own[f"{theirs}.attention.o_proj.{kind}"]
            state |= {f"{ours}.{norm}.{kind}": own[f"{theirs}.{norm}.{kind}"] for norm in ("norm1", "norm2")}
            state |= {f"{ours}.mlp.{new}.{kind}": own[f"{theirs}.mlp.{old}.{kind}"] for new, old in names.items()}
        for scale in (1, 2):
            state[f"{ours}.ls{scale}.gamma"] = own[f"{theirs}.layer_scale{scale}.lambda1"]
    name = "vit_small_plus_patch16_dinov3_qkvb" if gated else "vit_small_patch16_dinov3_qkvb"
    options = {"mlp_ratio": 176 / WIDTH, "swiglu_align_to": 8} if gated else {}
    compare(loaded(create(name, img_size=64, **options), state), model, ((64, 64), (96, 80)))


def test_nonzero_query_biases_are_not_lost() -> None:
    state = dinov3().state_dict()
    with pytest.raises(ValueError, match=r"unexpected \d+: blocks\.0\.attn\.q_bias.*qkv bias: yes.*qkv bias: no"):
        loaded(create("vit_small_patch16_dinov3", img_size=64), state)


# timm itself, and what it can convert


@pytest.mark.parametrize(
    "target",
    [
        create("vit_tiny_patch16_224", img_size=64),
        create("vit_small_patch14_reg4_dinov2", img_size=56),
        create("vit_medium_patch16_reg4_gap_256", img_size=64),
        create("vit_base_patch16_siglip_224", img_size=64),
        create("vit_small_patch16_dinov3", img_size=64),
        create("eva02_tiny_patch14_224", img_size=56),
    ],
)
def test_timms_own_names_stay(target: partial[nn.Module]) -> None:
    model: Any = randomise(target())
    backbone = loaded(target, model.state_dict())
    images = torch.randn(2, 3, *backbone.image_size)
    with torch.no_grad():
        assert torch.equal(backbone(images).tokens, model.forward_features(images))


def test_deit3_calls_its_layer_scale_gamma() -> None:
    target = create("deit3_small_patch16_224", img_size=64)
    model = randomise(target())
    state = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): x for key, x in model.state_dict().items()
    }
    assert "blocks.0.gamma_1" in state
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(target, state)(images).tokens, loaded(target, model.state_dict())(images).tokens)


def test_masked_autoencoders_are_no_dinov2() -> None:
    target = create("vit_tiny_patch16_224", img_size=64)
    state = {**target().state_dict(), "mask_token": torch.zeros(1, 1, 32), "decoder_pos_embed": torch.zeros(1, 17, 32)}
    backbone = loaded(target, state)
    assert backbone.positions == TIMM
    assert any("decoder_pos_embed" in note for note in backbone.notes)


def test_openai_clip_goes_through_timm() -> None:
    import open_clip

    config = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": DEPTH, "head_width": 16}
    text = {"width": 32, "heads": 2, "layers": 1, "vocab_size": 10, "context_length": 5}
    model: Any = randomise(open_clip.CLIP(embed_dim=32, vision_cfg=config, text_cfg=text))
    target = create("vit_base_patch16_clip_224", num_classes=32)
    backbone = loaded(target, model.state_dict())
    assert backbone.vit.patch_embed.grid_size == (4, 4)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        close(backbone.module(images), model.encode_image(images), TOLERANCE)


def test_timm_may_not_resample_the_patch_kernel() -> None:
    state = {"visual.class_embedding": torch.zeros(WIDTH), "visual.conv1.weight": torch.zeros(WIDTH, 3, 32, 32)}
    with pytest.raises(
        ValueError, match=r"visual\.conv1\.weight in the file is for patches of 32 px, the model has 16 px"
    ):
        loaded(create("vit_base_patch16_clip_224"), state)


def test_unknown_names_stay_and_are_told() -> None:
    module = create("vit_tiny_patch16_224", img_size=64)()
    converted = to_timm({"layers.0.weight": torch.zeros(1)}, module)
    assert set(converted.state) == {"layers.0.weight"}
    with pytest.raises(ValueError, match="loaded 0 of"):
        loaded(create("vit_tiny_patch16_224", img_size=64), {"layers.0.weight": torch.zeros(1)})


def test_swapped_keys_and_values_would_be_noticed() -> None:
    model = dinov2(4)
    state = dict(model.state_dict())
    one, other = "encoder.layer.0.attention.k_proj.weight", "encoder.layer.0.attention.v_proj.weight"
    state[one], state[other] = state[other], state[one]
    images = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        wrong = loaded(dinov2_target(4), state)(images).tokens - model(images).last_hidden_state
    assert wrong.abs().max() > 0.01
