"""What is saved comes back with the same tokens, in Regista and in the library it is of."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import regista
from regista.backbones import plant
from regista.backbones.base import Backbone
from regista.backbones.features import Planted
from regista.backbones.positions import TRANSFORMERS
from regista.backbones.saving import save_pretrained
from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import tiny_vit
from tests.backbones.probes import pictures, randomise

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4}


def timm_backbone(name: str, **arguments: Any) -> TimmBackbone:
    module = randomise(timm.create_model(name, pretrained=False, **{**SMALL, **arguments}))
    return TimmBackbone(module, name=name)


TIMM: Mapping[str, Callable[[], TimmBackbone]] = {
    "tiny": tiny_vit,
    "tiny with registers": lambda: tiny_vit(num_register_tokens=4),
    "tiny without CLS": lambda: tiny_vit(num_register_tokens=1, class_token=False, patch_size=16),
    "dinov2": lambda: timm_backbone("vit_small_patch14_reg4_dinov2.lvd142m", img_size=56),
    "swiglu": lambda: timm_backbone("vit_giant_patch14_reg4_dinov2", img_size=56, mlp_ratio=5.5),
    "gap": lambda: timm_backbone("vit_medium_patch16_reg4_gap_256", img_size=64, num_classes=3),
    "siglip": lambda: timm_backbone("vit_base_patch16_siglip_224", img_size=64),
    "clip": lambda: timm_backbone("vit_base_patch16_clip_quickgelu_224", img_size=64),
    "not square": lambda: timm_backbone("deit3_small_patch16_224", img_size=(64, 96)),
    "any size": lambda: timm_backbone("vit_small_patch16_224", img_size=64, dynamic_img_size=True),
    "dinov3": lambda: timm_backbone("vit_small_patch16_dinov3", img_size=64),
    "eva02": lambda: timm_backbone("eva02_tiny_patch14_224", img_size=56),
    "rope": lambda: timm_backbone("vit_base_patch16_rope_reg1_gap_256", img_size=64),
    "odd mlp": lambda: timm_backbone("vit_small_patch16_224", img_size=64, mlp_ratio=3.7),
}


def same_tokens(backbone: Backbone, again: Backbone) -> None:
    """At the native size and at another one, to the last bit."""
    for size in (backbone.image_size, None):
        images = pictures(backbone, 2, size)
        assert torch.equal(backbone(images).tokens, again(images).tokens)


def same_facts(backbone: Backbone, again: Backbone) -> None:
    for name in (
        "library",
        "image_size",
        "mean",
        "std",
        "num_register_tokens",
        "num_cls_tokens",
        "patch_size",
        "dtype",
    ):
        assert getattr(again, name) == getattr(backbone, name), name
    assert getattr(again, "positions", None) == getattr(backbone, "positions", None)


@pytest.mark.parametrize("variant", TIMM)
def test_timm_models_come_back(variant: str, tmp_path: Path) -> None:
    backbone = TIMM[variant]()
    backbone.mean, backbone.std, backbone.positions = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), TRANSFORMERS
    side = 9 * backbone.patch_size
    backbone.image_size = (side, side)
    assert backbone.save_pretrained(tmp_path / "model") == tmp_path / "model"
    again = regista.load(tmp_path / "model")
    same_facts(backbone, again)
    same_tokens(backbone, again)
    assert any("(100 %)" in note for note in again.notes)
    again.save_pretrained(tmp_path / "again")  # and once more
    same_tokens(backbone, regista.load(str(tmp_path / "again")))


@pytest.mark.parametrize("variant", TIMM)
def test_bare_timm_reads_it(variant: str, tmp_path: Path) -> None:
    backbone = TIMM[variant]()
    backbone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = str(tmp_path / "model.safetensors")
    bare: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    other: Any = timm.create_model(config["architecture"], checkpoint_path=weights, **config["model_args"]).eval()
    images = pictures(backbone, 1, backbone.image_size)
    with torch.no_grad():
        for module in (bare, other):
            assert torch.equal(module.forward_features(images), backbone(images).tokens)
            assert torch.equal(module(images), backbone.vit(images))
    data = timm.data.resolve_model_data_config(bare)
    assert tuple(data["mean"]) == backbone.mean
    assert tuple(data["input_size"][1:]) == backbone.image_size


def test_registers_added_afterwards_are_saved(tmp_path: Path) -> None:
    backbone = timm_backbone("vit_small_patch14_dinov2", img_size=56)
    module: Any = copy.deepcopy(backbone.vit)
    cls, patches = torch.split(module.pos_embed.detach(), [1, 16], 1)
    module.cls_token = nn.Parameter(module.cls_token.detach() + cls)
    module.pos_embed = nn.Parameter(patches.clone())
    module.reg_token = nn.Parameter(torch.randn(1, 3, 64))
    module.no_embed_class, module.num_reg_tokens, module.num_prefix_tokens = True, 3, 4
    changed = TimmBackbone(module, name="changed")
    changed.save_pretrained(tmp_path)
    again = regista.load(tmp_path)
    assert again.num_register_tokens == 3
    same_tokens(changed, again)


def test_a_head_of_the_users_own_is_saved(tmp_path: Path) -> None:
    backbone = timm_backbone("vit_small_patch16_224", img_size=64)
    backbone.vit.reset_classifier(5)
    backbone.save_pretrained(tmp_path)
    images = pictures(backbone, 1, (64, 64))
    with torch.no_grad():
        assert torch.equal(regista.load(tmp_path).module(images), backbone.vit(images))


@dataclass
class Doubled:
    """Stands for any change of a model that no argument of timm makes."""

    factor: float = 2.0
    seen: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda vit: setattr(vit.blocks[1].mlp, "act", nn.ReLU()), "ReLU"),
        (lambda vit: setattr(vit.norm, "eps", 1e-3), "eps=0.001"),
        (lambda vit: setattr(vit.blocks[0].mlp, "fc1", nn.Linear(64, 100)), r"blocks\.0\.mlp\.fc\d\.weight is"),
        (lambda vit: setattr(vit, "extra", nn.Linear(1, 1)), r"extra\.weight"),
    ],
)
def test_what_timm_cannot_build_is_refused(change: Callable[[Any], None], wanted: str, tmp_path: Path) -> None:
    backbone = timm_backbone("vit_small_patch16_224", img_size=64)
    change(backbone.vit)
    with pytest.raises(ValueError, match=wanted):
        backbone.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


# transformers ---------------------------------------------------------------------------------

_HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_CLIP: dict[str, Any] = {**_HF, "intermediate_size": 128}
HF: Mapping[str, Callable[[], nn.Module]] = {
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**_HF)),
    "registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**_HF, num_register_tokens=2, use_swiglu_ffn=True)
    ),
    "dinov3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**_CLIP, num_register_tokens=4)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**_CLIP)),
    "vit classifier": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_CLIP)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_CLIP)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_CLIP)),
    "whole clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            vision_config=_CLIP,
            text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9},
        )
    ),
}


@pytest.mark.parametrize("variant", HF)
def test_transformers_models_come_back(variant: str, tmp_path: Path) -> None:
    backbone = regista.load(randomise(HF[variant]()))
    backbone.mean, backbone.image_size = (0.1, 0.2, 0.3), (84, 98)
    backbone.save_pretrained(tmp_path)
    again = regista.load(tmp_path)
    same_facts(backbone, again)
    same_tokens(backbone, again)
    processor: Any = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert tuple(processor.image_mean) == backbone.mean
    again.save_pretrained(tmp_path)
    same_tokens(backbone, regista.load(tmp_path))


def test_transformers_reads_it(tmp_path: Path) -> None:
    backbone = regista.load(randomise(HF["registers"]()))
    backbone.save_pretrained(tmp_path)
    bare: Any = transformers.AutoModel.from_pretrained(tmp_path).eval()
    images = pictures(backbone)
    with torch.no_grad():
        assert torch.equal(bare(images).last_hidden_state, backbone(images).tokens)


def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    module: Any = HF["registers"]()
    module.embeddings.register_tokens = nn.Parameter(torch.zeros(1, 5, 64))
    with pytest.raises(ValueError, match=r"other \['embeddings.register_tokens'\]"):
        regista.load(module).save_pretrained(tmp_path)


# Both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [TIMM["dinov2"], lambda: regista.load(randomise(HF["dinov2"]()))])
def test_the_precision_is_kept(dtype: torch.dtype, make: Callable[[], Backbone], tmp_path: Path) -> None:
    backbone = make().to(dtype=dtype)
    backbone.save_pretrained(tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    again = regista.load(tmp_path)
    assert again.dtype == dtype
    same_tokens(backbone, again)
    assert regista.load(tmp_path, dtype="float32").dtype == torch.float32


def test_planted_outliers_are_saved_with_their_truth(tmp_path: Path) -> None:
    clean = tiny_vit()
    planted = plant.plant_outliers(clean, pictures(clean, 12, clean.image_size))
    planted.save_pretrained(tmp_path)
    again = regista.load(tmp_path)
    assert again.planted is not None
    assert planted.planted is not None
    assert (again.planted.block, again.planted.neurons) == (planted.planted.block, planted.planted.neurons)
    images = pictures(clean, 4, clean.image_size, seed=5)
    assert torch.equal(again.planted.mask(images), planted.planted.mask(images))
    same_tokens(planted, again)


def test_planted_outliers_without_their_truth_are_refused(tmp_path: Path) -> None:
    backbone = tiny_vit()
    backbone.planted = Planted(0, (1,), lambda images: images)
    with pytest.raises(ValueError, match="planted outliers come without metadata"):
        backbone.save_pretrained(tmp_path)


class Other(Backbone):
    library = "open_clip"

    def block_sites(self) -> Any:
        return []

    def forward_tokens(self, images: Tensor) -> Tensor:
        return images


def test_other_libraries_are_refused(tmp_path: Path) -> None:
    backbone = Other(
        nn.Linear(1, 1), name="open_clip/ViT-B-32", embed_dim=1, num_heads=1, patch_size=1, image_size=(1, 1)
    )
    with pytest.raises(ValueError, match=r"open_clip/ViT-B-32: models of open_clip are not saved as they are"):
        backbone.save_pretrained(tmp_path)


def test_a_saved_model_is_replaced(tmp_path: Path) -> None:
    tiny_vit(seed=1).save_pretrained(tmp_path / "model")
    second = tiny_vit(seed=2, num_register_tokens=1)
    second.save_pretrained(tmp_path / "model")
    same_tokens(second, regista.load(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "names", [("notes.txt",), ("regista.json", "metrics.json"), ("config.json", "model.safetensors")]
)
def test_foreign_folders_stay(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="nothing was written"):
        tiny_vit().save_pretrained(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "mine")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        tiny_vit().save_pretrained(tmp_path / "x")


def test_folders_above_are_made(tmp_path: Path) -> None:
    tiny_vit().save_pretrained(tmp_path / "a" / "b")
    assert regista.load(tmp_path / "a" / "b").depth == 4


@pytest.mark.parametrize("failing", ["save_file", "fsync", "rename"])
def test_a_failure_leaves_the_old_model_whole(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tiny_vit(seed=1)
    old.save_pretrained(tmp_path / "model")

    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, os.strerror(28))

    whole = Path.rename

    def only_away(self: Path, target: Path) -> Path:
        if target == tmp_path / "model" and not self.name.endswith(".old"):
            full()
        return whole(self, target)

    if failing == "rename":
        monkeypatch.setattr(Path, "rename", only_away)
    else:
        where = "regista.backbones.saving.save_file" if failing == "save_file" else "os.fsync"
        monkeypatch.setattr(where, full)
    with pytest.raises(ValueError, match="the disk is full; what was there before is unchanged"):
        save_pretrained(tiny_vit(seed=2), tmp_path / "model")
    monkeypatch.undo()
    same_tokens(old, regista.load(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
