"""CLIP's projected patches: against the libraries' own towers, and against a last block written out in loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista.backbones.base import Backbone
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg.clip_patches import is_clip, projected_patches, read_outs
from regista.methods.phreg.student import make_student, parts_of, trained_parameters
from regista.methods.protocol import Workspace
from tests.backbones.probes import close, pictures, randomise
from tests.backbones.test_additions import CLIP, of_open_clip
from tests.backbones.test_transformers import MODELS

TOWERS: dict[str, Callable[[], Any]] = {
    "open_clip": lambda: of_open_clip(CLIP),
    "transformers": lambda: regista.load(randomise(MODELS["clip"]())),
    "transformers vision": lambda: regista.load(randomise(MODELS["clip projection"]())),
}
SHORT: dict[str, Any] = {"registers": 2, "epochs": 2, "num_views": 2, "batch_size": 2, "held_out": 0.4, "lr": 1e-4}


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> Backbone:
    backbone: Backbone = TOWERS[request.param]()
    return backbone


def test_the_usual_last_block_is_the_models_own(tower: Backbone) -> None:
    images = pictures(tower, 2)
    site = f"blocks.{tower.depth - 1}.resid"
    features = tower(images, [site])
    wanted = tower.to_joint_space(features.layout.take(features.captured[site], "patches"))
    close(projected_patches(tower, images, variant="vanilla"), wanted, 1e-5)


def test_cls_of_the_joint_space_is_the_image_embedding(tower: Backbone) -> None:
    """The projection of the patches is the one that the library puts CLS through."""
    images = pictures(tower, 2, tower.image_size)
    site = f"blocks.{tower.depth - 1}.resid"
    features = tower(images, [site])
    cls = tower.to_joint_space(features.layout.take(features.captured[site], "cls")).squeeze(1)
    full: Any = getattr(tower, "full_model", tower.module)
    with torch.no_grad():
        if hasattr(full, "encode_image"):
            wanted = full.encode_image(images)
        elif hasattr(full, "get_image_features"):
            found = full.get_image_features(pixel_values=images)
            wanted = found if isinstance(found, Tensor) else found.pooler_output
        else:
            wanted = full(pixel_values=images).image_embeds
    close(cls, wanted, 1e-5)


@pytest.mark.parametrize("variant", ["maskclip", "naclip"])
def test_against_a_last_block_in_loops(variant: str) -> None:
    """open_clip's weights by their own names, one head and one token after the other, in float64."""
    backbone = TOWERS["open_clip"]().to(dtype=torch.float64)
    images = pictures(backbone, 1)
    rows, columns = backbone.layout((images.shape[-2], images.shape[-1])).grid_size
    vit = backbone.module
    block = vit.transformer.resblocks[-1]
    with torch.no_grad():
        x = backbone(images, ["blocks.0.resid"]).captured["blocks.0.resid"][0]
        _, k, v = (block.ln_1(x) @ block.attn.in_proj_weight.T + block.attn.in_proj_bias).chunk(3, -1)
        heads, width = block.attn.num_heads, x.shape[-1] // block.attn.num_heads
        out = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for token in range(len(x)):
                if variant == "maskclip":
                    out[token, part] = v[token, part]
                    continue
                logits = []
                for other in range(len(x)):
                    near = 0.0
                    if token and other:  # token 0 is CLS
                        (a, b), (c, d) = divmod(token - 1, columns), divmod(other - 1, columns)
                        near = math.exp(-((a - c) ** 2 + (b - d) ** 2) / 50)
                    logits.append(float(k[token, part] @ k[other, part]) / math.sqrt(width) + near)
                out[token, part] = torch.tensor(logits, dtype=x.dtype).softmax(0) @ v[:, part]
        wanted = vit.ln_post(block.attn.out_proj(out)) @ vit.proj
        got = projected_patches(backbone, images, variant=variant)  # type: ignore[arg-type]
    assert len(x) == 1 + rows * columns
    torch.testing.assert_close(got[0], wanted[1:], rtol=1e-6, atol=1e-6)  # the Gaussian is float32


def test_read_outs_by_name(tower: Backbone) -> None:
    images = pictures(tower, 1)
    assert read_outs(tower, "normed") == (None, None)
    teacher, student = read_outs(tower, "clip-released")
    assert teacher is not None
    assert student is not None
    assert torch.equal(teacher(tower, images), projected_patches(tower, images, variant="naclip"))
    assert torch.equal(student(tower, images), projected_patches(tower, images, variant="maskclip"))


def test_models_without_a_joint_space_are_refused() -> None:
    assert not is_clip(tiny_vit())
    assert is_clip(TOWERS["open_clip"]())
    with pytest.raises(ValueError, match=r"is for CLIP models .*read_out='normed'"):
        read_outs(tiny_vit(), "clip-released")


# Trained -------------------------------------------------------------------------------------


def test_two_blocks_are_trained_as_released(tower: Backbone) -> None:
    student = make_student(tower, 2, 0)
    names = set(trained_parameters(student, tower, parts_of("released", clip=True)))
    last = {id(value) for site in student.block_sites()[-2:] for value in site.block.parameters()}
    assert last <= {id(value) for name, value in student.module.named_parameters() if name in names}


@pytest.mark.parametrize("read_out", ["normed", "clip-released"])
@pytest.mark.parametrize("targets", ["stored", "fresh"])
def test_a_clip_student(tower: Backbone, photos: list[Path], read_out: str, targets: str) -> None:
    """Both read-outs train, change what is trained alone, and lower the loss of random registers."""
    before = {name: value.clone() for name, value in tower.module.state_dict().items()}
    settings = {**SHORT, "epochs": 8, "unfrozen": "released", "read_out": read_out, "targets": targets}
    cured = regista.fix(tower, "phreg", photos, **settings)
    state = cured.history[-1]["state"]
    assert state["after"]["held_out_loss"] < state["before"]["held_out_loss"]
    assert all(torch.equal(value, before[name]) for name, value in tower.module.state_dict().items())
    fresh = make_student(tower, 2, 0)
    trained = set(trained_parameters(fresh, tower, parts_of("released", clip=True)))
    for name, value in fresh.module.state_dict().items():
        if name not in trained:
            assert torch.equal(cured.module.state_dict()[name], value), name
    assert cured.num_register_tokens == 2


def test_stored_targets_of_another_read_out_are_refused(photos: list[Path], tmp_path: Path) -> None:
    tower = TOWERS["open_clip"]()
    work = tmp_path / "work"
    regista.fix(tower, "phreg", photos, workspace=work, **SHORT)
    with pytest.raises(ValueError, match=r"read-?out"):
        regista.fix(tower, "phreg", photos, workspace=Workspace(work, True), read_out="clip-released", **SHORT)
