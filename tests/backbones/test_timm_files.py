"""``timm/NAME@FILE``: the model is built to fit the file, and anything lost is an error."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import regista
from regista.backbones.positions import TIMM
from regista.backbones.timm import TimmBackbone
from regista.backbones.timm_files import backbone_from_file
from tests.backbones.probes import randomise

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4}


def create(name: str = "vit_small_patch16_224", **arguments: Any) -> partial[nn.Module]:
    return partial(timm.create_model, name, pretrained=False, **{**SMALL, **arguments})


def loaded(target: partial[nn.Module], model: nn.Module, **options: Any) -> TimmBackbone:
    return backbone_from_file(target, model.state_dict(), name="test", source="file", **options)


def same_tokens(backbone: TimmBackbone, model: Any, *size: int) -> None:
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert torch.equal(backbone(images).tokens, model.forward_features(images))


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224", "eva_large_patch14_196"],
)
def test_a_table_of_another_grid_builds_the_model_for_it(name: str) -> None:
    patch = 14 if "patch14" in name else 16
    model = randomise(create(name, img_size=6 * patch)())
    backbone = loaded(create(name, img_size=4 * patch), model)
    assert backbone.image_size == (6 * patch, 6 * patch)
    assert torch.equal(backbone.vit.pos_embed, model.pos_embed)
    assert any(f"built for {6 * patch}x{6 * patch} px" in note and "6x6 cells" in note for note in backbone.notes)
    same_tokens(backbone, model, 6 * patch, 6 * patch)


def test_the_right_grid_is_no_news() -> None:
    model = randomise(create(img_size=64)())
    backbone = loaded(create(img_size=64), model)
    assert not any("built for" in note for note in backbone.notes)
    assert backbone.notes[0].startswith("file: loaded 32 of 32 tensors (100 %)")


def test_a_table_that_is_not_square_needs_the_image_size() -> None:
    model = randomise(create(img_size=(64, 96))())
    for size in (None, (64, 64)):
        with pytest.raises(ValueError, match=r"table is of 24 patches.*image_size=\(height, width\); got"):
            loaded(create(img_size=64), model, image_size=size)
    backbone = loaded(create(img_size=64), model, image_size=(64, 96))
    assert backbone.vit.patch_embed.grid_size == (4, 6)
    same_tokens(backbone, model, 64, 96)


def test_an_image_size_alone_never_resamples() -> None:
    model = randomise(create(img_size=64)())
    backbone = loaded(create(img_size=64), model, image_size=(32, 128))  # also of 16 patches
    assert backbone.vit.patch_embed.grid_size == (4, 4)
    assert backbone.image_size == (32, 128)
    same_tokens(backbone, model, 64, 64)


@pytest.mark.parametrize("classes", [0, 7])
def test_heads_keep_their_classes(classes: int) -> None:
    model = randomise(create(img_size=64, num_classes=classes)())
    backbone = loaded(create(img_size=64), model)
    assert backbone.vit.num_classes == classes
    same_tokens(backbone, model, 64, 64)


def test_a_norm_behind_the_pooling_is_kept_there() -> None:
    model: Any = randomise(create(img_size=64, global_pool="avg", num_classes=5)())
    backbone = loaded(create(img_size=64), model)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(backbone.module(images), model(images))


def test_weights_of_another_size_are_one_error() -> None:
    model = create(img_size=64, embed_dim=96, depth=3)()
    with pytest.raises(
        ValueError, match=r"loaded 1 of 32 tensors.*\(width 96, 3 blocks, MLP of 384\).*\(width 64, 2 blocks"
    ):
        loaded(create(img_size=64), model)


def test_a_deeper_file_is_not_cut() -> None:
    model = create(img_size=64, depth=3)()
    with pytest.raises(
        ValueError, match=r"loaded 32 of 32 tensors \(100 %\); unexpected 12: blocks\.2.*3 blocks.*2 blocks"
    ):
        loaded(create(img_size=64), model)


def test_the_mlp_kind_is_named() -> None:
    model = create("vit_giant_patch14_reg4_dinov2", img_size=56, mlp_ratio=4)()
    plain = create("vit_small_patch14_reg4_dinov2", img_size=56)
    with pytest.raises(ValueError, match=r"\(SwiGLU of 128\) than the model built \(MLP of 256\)"):
        loaded(plain, model)
    with pytest.raises(ValueError, match=r"\(MLP of 256\) than the model built \(SwiGLU of 128\)"):
        loaded(create("vit_giant_patch14_reg4_dinov2", img_size=56, mlp_ratio=4), plain())


def test_lost_registers_are_an_error_that_names_the_right_architecture() -> None:
    model = create("vit_small_patch14_reg4_dinov2", img_size=56)()
    with pytest.raises(ValueError, match=r"4 registers.*0 registers.*try vit_small_patch14_reg4_dinov2"):
        loaded(create("vit_small_patch14_dinov2", img_size=56), model)
    model = create("vit_small_patch14_dinov2", img_size=56)()
    with pytest.raises(ValueError, match=r"0 registers.*4 registers.*try vit_small_patch14_dinov2"):
        loaded(create("vit_small_patch14_reg4_dinov2", img_size=56), model)


def test_a_part_is_loaded_on_request_and_told() -> None:
    model = randomise(create(img_size=64, depth=1)())
    with pytest.raises(ValueError, match="missing 12"):
        loaded(create(img_size=64), model)
    backbone = loaded(create(img_size=64), model, allow_partial=True)
    assert backbone.notes[0].startswith("file: loaded 20 of 32 tensors (62 %); missing 12")


def test_building_does_not_disturb_the_seed() -> None:
    model = create(img_size=64)()
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    loaded(create(img_size=64), model)
    assert torch.equal(torch.rand(1), wanted)


def test_what_cannot_be_looked_into_is_refused_first() -> None:
    with pytest.raises(ValueError, match="ResNet is not a timm VisionTransformer or Eva"):
        backbone_from_file(partial(timm.create_model, "resnet18", pretrained=False), {}, name="test", source="file")


# Through regista.load -------------------------------------------------------------------------

ARCHITECTURE = "test_vit"


def seeded_vit() -> Any:
    torch.manual_seed(3)
    return randomise(timm.create_model(ARCHITECTURE, pretrained=False))


def test_a_file_by_its_spec(tmp_path: Path) -> None:
    model: Any = seeded_vit()
    save_file(model.state_dict(), tmp_path / "w@1.safetensors")
    backbone = regista.load(f"timm/{ARCHITECTURE}@{tmp_path / 'w@1.safetensors'}")
    assert isinstance(backbone, TimmBackbone)
    assert backbone.name == f"timm/{ARCHITECTURE}@{tmp_path / 'w@1.safetensors'}"
    assert backbone.positions == TIMM
    same_tokens(backbone, model, *backbone.image_size)


def test_a_training_checkpoint_by_its_spec(tmp_path: Path) -> None:
    model, other = seeded_vit(), timm.create_model(ARCHITECTURE, pretrained=False)
    under = {f"module.backbone.{key}": value for key, value in other.state_dict().items()}
    content = {
        "student": {**under, "module.head.mlp.0.weight": torch.ones(2)},
        "teacher": {f"backbone.{key}": value for key, value in model.state_dict().items()},
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "epoch": 100,
    }
    torch.save(content, tmp_path / "w.pth")
    backbone = regista.load(f"timm/{ARCHITECTURE}@{tmp_path / 'w.pth'}")
    same_tokens(backbone, model, *backbone.image_size)  # type: ignore[arg-type]
    notes = "\n".join(backbone.notes)
    assert "read from teacher.backbone.* and not from student.module.backbone.*" in notes
    assert "optimizer" in notes


def test_a_damaged_weight_is_found_at_load(tmp_path: Path) -> None:
    model: Any = seeded_vit()
    model.blocks[1].mlp.fc2.weight.data.view(-1)[5] = float("nan")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    spec = f"timm/{ARCHITECTURE}@{tmp_path / 'w.safetensors'}"
    with pytest.raises(ValueError, match=r"1 of \d+ values of 'blocks\.1\.mlp\.fc2\.weight' are NaN or infinite"):
        regista.load(spec)
    assert regista.load(spec, allow_partial=True).depth == len(model.blocks)
