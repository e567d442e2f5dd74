"""Live modules: the right adapter, wrappers taken off, compiled and unknown ones refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import regista
from regista.backbones.live import ADAPTERS
from regista.registry import Registry
from tests.backbones.probes import pictures, state

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4}


def timm_vit() -> nn.Module:
    return timm.create_model("vit_small_patch16_224", pretrained=False, img_size=64, **SMALL).eval()


def hugging_face_vit() -> nn.Module:
    config = transformers.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14
    )
    return transformers.Dinov2Model(config).eval()


def torchvision_vit() -> nn.Module:
    options = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return torchvision.models.VisionTransformer(image_size=64, patch_size=16, **options).eval()


def open_clip_vit() -> nn.Module:
    import open_clip

    vision = {"image_size": 64, "patch_size": 16, "width": 64, "layers": 2, "head_width": 16}
    text = {"width": 32, "heads": 2, "layers": 1, "vocab_size": 10, "context_length": 5}
    return open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text).eval()


class MyVit(timm.models.VisionTransformer):  # type: ignore[misc]
    """A user's own subclass."""


LIVE: dict[str, tuple[Callable[[], Any], str]] = {
    "timm": (timm_vit, "timm"),
    "eva": (lambda: timm.create_model("vit_small_patch16_dinov3", img_size=64, **SMALL), "timm"),
    "transformers": (hugging_face_vit, "transformers"),
    "torchvision": (torchvision_vit, "torchvision"),
    "open_clip": (open_clip_vit, "open_clip"),
    "open_clip tower": (lambda: open_clip_vit().visual, "open_clip"),
    "subclass": (lambda: MyVit(img_size=64, **SMALL), "timm"),
}


@pytest.mark.parametrize("variant", LIVE)
def test_every_library(variant: str) -> None:
    make, library = LIVE[variant]
    module = make()
    before = state(module)
    backbone = regista.load(module)
    assert backbone.library == library
    assert backbone.name == type(module).__name__
    assert backbone(pictures(backbone)).patches.shape[1] == 30
    assert state(module) == before  # in the mode it was in, where it was
    assert regista.load(module, image_size=(112, 224)).image_size == (112, 224)


def test_a_live_module_keeps_its_precision_and_can_be_given_another() -> None:
    module = timm_vit().to(torch.bfloat16)
    assert regista.load(module).dtype == torch.bfloat16
    assert regista.load(module, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(torch.compile(m)))]
)
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = timm_vit()
    backbone = regista.load(wrap(module))
    assert backbone.module is module
    site = "blocks.1.resid"
    assert backbone(pictures(backbone), [site]).captured[site].shape == (2, 31, 64)


def test_distributed_wrappers_are_taken_off(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = timm_vit()
        assert regista.load(nn.parallel.DistributedDataParallel(module)).module is module
    finally:
        torch.distributed.destroy_process_group()


def in_place(module: Any) -> nn.Module:
    module.compile(backend="eager")
    return module  # type: ignore[no-any-return]


def one_block(module: Any) -> nn.Module:
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    return module  # type: ignore[no-any-return]


def one_block_in_place(module: Any) -> nn.Module:
    module.blocks[1].compile(backend="eager")
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "part"), [(in_place, "it"), (one_block, r"blocks\.1"), (one_block_in_place, r"blocks\.1")]
)
def test_compiled_parts_are_refused(change: Callable[[nn.Module], nn.Module], part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}.* is compiled, and hooks do not run .*before torch\.compile"):
        regista.load(change(timm_vit()))


class FullyShardedDataParallel(nn.Module):
    """Named as torch's."""


def test_sharded_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="is sharded"):
        regista.load(FullyShardedDataParallel())


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: nn.Linear(1, 1), r"a Linear is not a ViT .*Accepted: timm VisionTransformer and Eva · transformers"),
        (lambda: nn.Sequential(nn.Identity(), timm_vit()), "hand over the VisionTransformer inside it"),
        (
            lambda: nn.Sequential(torchvision.ops.Permute([0]), torchvision_vit()),
            "hand over the VisionTransformer inside it",
        ),
        (lambda: timm.create_model("resnet18"), "ResNet is not a timm VisionTransformer or Eva"),
        (lambda: torchvision.models.resnet18(), "ResNet is not a torchvision VisionTransformer"),
        (lambda: transformers.ResNetModel(transformers.ResNetConfig(depths=[1, 1, 1, 1])), "ResNetModel is not one of"),
    ],
)
def test_other_modules_are_refused(make: Callable[[], nn.Module], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        regista.load(make())


class DinoVisionTransformer(nn.Module):
    """Named as torch.hub's, with nothing inside."""


def test_a_hub_name_alone_is_not_enough() -> None:
    with pytest.raises(ValueError, match="is not a hub DINOv2"):
        regista.load(DinoVisionTransformer())


def test_other_packages_join_by_entry_point() -> None:
    assert isinstance(ADAPTERS, Registry)
    assert ADAPTERS.entry_point_group == "regista.adapters"
    assert set(ADAPTERS.names()) >= {"timm", "transformers", "open_clip", "torchvision", "DinoVisionTransformer"}


def test_a_copy_of_a_backbone_has_its_own_notes() -> None:
    backbone = regista.load(timm_vit())
    other = copy.deepcopy(backbone)
    other.notes.append("mine")
    assert backbone.notes == []
