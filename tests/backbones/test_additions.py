"""What is added to a model is found again: in a live module, in a saved one, in another process."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file

import regista
from regista.backbones.additions import KINDS, add_from_records, additions_of
from regista.backbones.attention_bias import AttentionBias
from regista.backbones.base import Backbone
from regista.backbones.inserted_registers import InsertedRegisters
from regista.backbones.live import from_module
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg.denoised import DenoisedViews
from tests.backbones.probes import pictures, randomise
from tests.backbones.test_dinov2_hub import hub
from tests.backbones.test_saving import same_facts, same_tokens, timm_backbone
from tests.backbones.test_torchvision import model as torchvision_model
from tests.backbones.test_transformers import MODELS

CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 2, "width": 48, "head_width": 24, "patch_size": 14, "image_size": 56},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
}


SIGLIP = {
    "embed_dim": 16,
    "vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 64},
    "text_cfg": CLIP["text_cfg"],
}


def of_open_clip(config: dict[str, Any]) -> Any:
    name = "regista-test-" + ("timm" if "timm_model_name" in config["vision_cfg"] else "clip")
    open_clip.factory._MODEL_CONFIGS[name] = config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = randomise(open_clip.create_model(name))
    return from_module(module, name=f"open_clip/{name}/none")


SAVED: dict[str, Callable[[], Any]] = {
    "tiny": tiny_vit,
    "timm dinov2": lambda: timm_backbone("vit_small_patch14_reg4_dinov2.lvd142m", img_size=56),
    "timm embed_class": lambda: timm_backbone("vit_small_patch16_224", img_size=64, num_classes=3),
    "timm swiglu": lambda: timm_backbone("vit_giant_patch14_reg4_dinov2", img_size=56, mlp_ratio=5.5),
    "timm gap": lambda: timm_backbone("vit_medium_patch16_reg4_gap_256", img_size=64),
    "timm siglip": lambda: timm_backbone("vit_base_patch16_siglip_224", img_size=64),
    "timm dinov3": lambda: timm_backbone("vit_small_patch16_dinov3", img_size=64),
    "timm eva02": lambda: timm_backbone("eva02_tiny_patch14_224", img_size=56),
    **{
        f"transformers {kind}": lambda kind=kind: regista.load(randomise(MODELS[kind]()))
        for kind in ("dinov2", "registers 4", "dinov3 1 gated", "vit", "vit classifier", "clip", "siglip")
    },
    "open_clip": lambda: of_open_clip(CLIP),
    "open_clip timm": lambda: of_open_clip(SIGLIP),
}


def added(backbone: Backbone, kind: str) -> Backbone:
    """One addition of a kind, or of all kinds, on a copy."""
    generator = torch.Generator().manual_seed(1)
    new = copy.deepcopy(backbone)
    if kind in ("inserted-registers", "all"):
        new = new.with_registers(torch.randn(2, backbone.embed_dim, generator=generator))
    if kind in ("register-neurons", "all"):
        receiving = 1 if new.num_register_tokens else 0
        new.add(RegisterNeurons({0: [3, 1], 1: [2]}, prefix_segments(new.layout()), receiving))
    if kind in ("attention-bias", "all"):
        shape = (2, backbone.depth, backbone.num_heads, backbone.embed_dim // backbone.num_heads)
        new.add(AttentionBias(*torch.randn(shape, generator=generator)))
    if kind == "denoised-views":
        new.add(DenoisedViews(3, 0.4, 1))
    if kind == "all":
        new.add(RegisterNeurons({1: [5]}, prefix_segments(new.layout()), 0, "released"))
    return new


# Saved and loaded --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inserted-registers", "register-neurons", "attention-bias", "denoised-views", "all"])
@pytest.mark.parametrize("model", [name for name in SAVED if name != "open_clip timm"])
def test_saved_models_come_back_with_what_was_added(model: str, kind: str, tmp_path: Path) -> None:
    backbone = added(SAVED[model](), kind)
    backbone.history = [{"method": "mine", "config": {}, "state": {}}]
    backbone.save_pretrained(tmp_path / "model")
    again = regista.load(tmp_path / "model")
    same_facts(backbone, again)
    same_tokens(backbone, again)
    assert [addition.to_record() for addition in again.additions] == [one.to_record() for one in backbone.additions]
    assert again.history == backbone.history
    assert again.needs_regista == backbone.needs_regista
    state, wanted = again.module.state_dict(), backbone.module.state_dict()
    assert set(state) == set(wanted)
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    again.save_pretrained(tmp_path / "again")
    same_tokens(backbone, regista.load(tmp_path / "again"))


@pytest.mark.parametrize("kind", ["attention-bias", "all"])
def test_a_timm_tower_in_open_clip_comes_back(kind: str, tmp_path: Path) -> None:
    backbone = added(SAVED["open_clip timm"](), kind)
    again = regista.load(backbone.save_pretrained(tmp_path / "model"))
    same_facts(backbone, again)
    same_tokens(backbone, again)
    images, tokens = pictures(backbone, 2, backbone.image_size), torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        assert torch.equal(again.full_model.encode_image(images), backbone.full_model.encode_image(images))
        assert torch.equal(again.encode_text(tokens), backbone.encode_text(tokens))
    again.save_pretrained(tmp_path / "again")
    same_tokens(backbone, regista.load(tmp_path / "again"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model", ["tiny", "transformers clip"])
def test_precision_comes_back(model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    backbone = added(SAVED[model](), "all").to(dtype=dtype)
    with torch.no_grad():
        for value in backbone.module.parameters():
            value.mul_(1 / 3)  # has no exact neighbour in another precision
    backbone.save_pretrained(tmp_path / "model")
    again = regista.load(tmp_path / "model")
    assert again.dtype == dtype
    same_tokens(backbone, again)


def test_another_process_reads_it(tmp_path: Path) -> None:
    backbone = added(SAVED["transformers clip"](), "all")
    backbone.save_pretrained(tmp_path / "model")
    images = pictures(backbone)
    save_file({"images": images}, tmp_path / "images.safetensors")
    code = (
        "import sys, regista; from safetensors.torch import load_file, save_file\n"
        "images = load_file(sys.argv[2])['images']\n"
        "save_file({'tokens': regista.load(sys.argv[1])(images).tokens.detach().contiguous()}, sys.argv[3])\n"
    )
    names = [str(tmp_path / name) for name in ("model", "images.safetensors", "tokens.safetensors")]
    subprocess.run([sys.executable, "-c", code, *names], check=True, capture_output=True, timeout=120)
    assert torch.equal(load_file(names.pop())["tokens"], backbone(images).tokens)


def test_other_libraries_refuse_the_folder(tmp_path: Path) -> None:
    for model in ("tiny", "transformers vit"):
        folder = added(SAVED[model](), "register-neurons").save_pretrained(tmp_path / model)
        with pytest.raises(RuntimeError, match="needs-regista"):
            timm.create_model(f"local-dir:{folder}", pretrained=True)
        with pytest.raises(ValueError, match="needs-regista"):
            transformers.AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("make", [lambda: hub("no registers"), torchvision_model])
def test_libraries_without_a_format_say_so(make: Any, tmp_path: Path) -> None:
    backbone = added(regista.load(make()), "all")
    with pytest.raises(ValueError, match="with additions are not saved; take the same weights through timm"):
        backbone.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_open_clip_model_of_unknown_name_is_not_saved(tmp_path: Path) -> None:
    backbone = added(SAVED["open_clip"](), "attention-bias")
    backbone.name, backbone.architecture = "mine", None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="open_clip architecture it is cannot be told"):
        backbone.save_pretrained(tmp_path / "model")


def test_weights_that_are_missing_are_counted(tmp_path: Path) -> None:
    folder = added(tiny_vit(), "all").save_pretrained(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (lost,) = (key for key in weights if key.endswith("bias.keys"))
    save_file({key: value for key, value in weights.items() if key != lost}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"loaded {len(weights) - 1} of {len(weights)}"):
        regista.load(folder)


# Live --------------------------------------------------------------------------------------


def test_a_live_module_shows_what_was_added_in_order() -> None:
    backbone = added(SAVED["transformers vit"](), "all")
    kinds = ["inserted-registers", "register-neurons", "attention-bias", "register-neurons"]
    assert [addition.kind for addition in additions_of(backbone.module)] == kinds
    assert additions_of(backbone.module) == backbone.additions
    again = regista.load(backbone.module)
    assert again.additions == backbone.additions
    assert again.num_register_tokens == 2
    images = pictures(backbone)
    assert torch.equal(again(images).tokens, backbone(images).tokens)


def test_reasons_are_told_together() -> None:
    assert tiny_vit().needs_regista is None
    assert tiny_vit().with_registers(torch.zeros(2, 64)).needs_regista is None  # timm has a place for them
    assert str(added(tiny_vit(), "all").needs_regista).split(" and ")[0] == "its register neurons act through a hook"


def test_additions_are_no_layers() -> None:
    for addition in added(SAVED["transformers vit"](), "all").additions:
        with pytest.raises(NotImplementedError, match="works by its hooks"):
            addition(torch.zeros(1))
        if not isinstance(addition, InsertedRegisters):
            with pytest.raises(NotImplementedError, match="has no registers"):
                addition.register_table()


# Records -----------------------------------------------------------------------------------


def test_records_are_plain_values() -> None:
    backbone = added(SAVED["transformers vit"](), "all")
    records = [addition.to_record() for addition in backbone.additions]
    assert json.loads(json.dumps(records)) == records
    assert all(record["kind"] in KINDS for record in records)
    again = SAVED["transformers vit"]()
    add_from_records(again, records)
    again.module.load_state_dict(backbone.module.state_dict())
    same_tokens(backbone, again)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "attention-bais"}, "unknown addition 'attention-bais'.*attention-bias"),
        ({}, "unknown addition 'None'"),
        ({"kind": "register-neurons", "neurons": {"0": [1]}}, "record of 'register-neurons' makes no sense.*segments"),
        ({"kind": "attention-bias", "shape": 3}, "record of 'attention-bias' makes no sense"),
    ],
)
def test_records_that_make_no_sense_are_refused(record: dict[str, Any], message: str) -> None:
    backbone = tiny_vit()
    with pytest.raises(ValueError, match=message):
        add_from_records(backbone, [record])
    assert backbone.additions == []
