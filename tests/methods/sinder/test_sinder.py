"""SINDER's detection and repair target as a method, on models with one planted singular defect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import regista
from regista.backbones.block_weights import block_parts
from regista.backbones.tiny import tiny_vit
from regista.methods.sinder.directions import linear_block, model_directions
from regista.methods.sinder.method import first_offending
from tests.backbones.naive_repair import smoothed
from tests.backbones.probes import close, pictures
from tests.methods.defective import BLOCK, INNER, defective_vit, truth

FEW = {"num_samples": 4000, "num_deviations": 3.0}  # 3 of 64 cells: at 4 deviations they hide each other


@pytest.mark.parametrize("inputs", ["unit", "normed"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_weights_alone_give_the_direction(gated: bool, inputs: str) -> None:
    sick, written = defective_vit(gated=gated)
    found = model_directions(sick, num_samples=4000, inputs=inputs)  # type: ignore[arg-type]
    assert found.shape == (4, 64)
    cosines = (found @ written).abs()
    assert float(cosines[0]) < 0.5
    assert float(cosines[BLOCK:].min()) > 0.9


@pytest.mark.parametrize("gated", [False, True])
def test_defects_are_gone_and_the_rest_stays(gated: bool) -> None:
    sick, _ = defective_vit(gated=gated)
    fitting, others = (pictures(sick, 5, sick.image_size, seed) for seed in (0, 1))
    cured = regista.fix(sick, "sinder", fitting, **FEW)
    (entry,) = cured.history
    assert entry["state"]["block"] == BLOCK
    assert entry["state"]["images_with_defects"][BLOCK] == 5
    assert entry["state"]["defects"][BLOCK] == 15
    site = f"blocks.{BLOCK}.resid"
    with torch.no_grad():
        old, new = (sick.layout().take(model(others, site).captured[site], "patches") for model in (sick, cured))
    direction = model_directions(sick, num_samples=4000)[BLOCK]
    for before, after in zip(old, new, strict=True):
        wanted, count = smoothed(before.unflatten(0, (8, 8)), direction, 3.0, True, 3)
        assert count == len(INNER)
        close(after.unflatten(0, (8, 8)), wanted, 1e-5)
    mask = truth(count=5).flatten(1)
    assert torch.equal(new[~mask], old[~mask])
    assert float(new[mask].norm(dim=-1).max()) < 0.1 * float(old[mask].norm(dim=-1).min())
    assert "high-norm" not in regista.diagnose(cured, others).kinds


def test_the_border_and_small_groups_are_left_alone_as_in_the_paper() -> None:
    sick, _ = defective_vit(((0, 3), (4, 7), (7, 0), (4, 4)))
    images = pictures(sick, 4, sick.image_size)
    with pytest.raises(ValueError, match="no singular defects in any block on these 4 images"):
        regista.fix(sick, "sinder", images, **FEW)
    (entry,) = regista.fix(sick, "sinder", images, **FEW, ignore_border=False).history
    assert entry["state"]["defects"][BLOCK] == 16
    (entry,) = regista.fix(sick, "sinder", images, **FEW, min_tokens=1).history
    assert entry["state"]["defects"][BLOCK] == 4


def test_an_attention_norm_is_treated_like_the_others() -> None:
    """LayerNorm without its division is a linear map; so is the projection behind it."""
    backbone = tiny_vit()
    parts = block_parts(backbone, 0)
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight)
    from dataclasses import replace

    block = linear_block(replace(parts, inner_norm=norm), "block 0")
    centring = np.eye(64) - np.full((64, 64), 1 / 64)
    wanted = parts.out_weight.detach().numpy() @ np.diag(norm.weight.detach().numpy()) @ centring
    close(block.output_weight.detach(), torch.from_numpy(wanted), 1e-5)


def test_the_first_offending_block_is_no_chance_find() -> None:
    assert first_offending([0, 0, 0]) is None
    assert first_offending([0, 1, 6, 6]) == 2
    assert first_offending([0, 3, 6, 2]) == 1
    assert first_offending([5, 0, 1]) == 0


def test_settings_come_first() -> None:
    sick, _ = defective_vit()
    images = pictures(sick, 3, sick.image_size)
    (entry,) = regista.fix(sick, "sinder", images, **FEW, block=2).history
    assert entry["state"]["block"] == 2
    with pytest.raises(ValueError, match="no singular defects at block 0"):
        regista.fix(sick, "sinder", images, **FEW, block=0)


def test_it_is_saved(tmp_path: Path) -> None:
    sick, _ = defective_vit()
    images = pictures(sick, 3, sick.image_size)
    cured = regista.fix(sick, "sinder", images, **FEW)
    again = regista.load(cured.save_pretrained(tmp_path / "model"))
    assert torch.equal(again(images).tokens, cured(images).tokens)
    assert not torch.equal(cured(images).tokens, sick(images).tokens)
    assert again.history == cured.history


def test_progress_counts_images() -> None:
    sick, _ = defective_vit()
    seen: list[tuple[str, int, int]] = []
    images = pictures(sick, 5, sick.image_size)
    regista.fix(sick, "sinder", images, **FEW, batch_size=2, progress=lambda *told: seen.append(told))
    assert seen == [("defects", 2, 5), ("defects", 4, 5), ("defects", 5, 5)]


def test_models_that_are_not_linear_enough_are_refused() -> None:
    backbone = tiny_vit()
    backbone.block_sites()[1].mlp_out.register_forward_pre_hook(lambda _module, _args: None)
    with pytest.raises(ValueError, match="block 1: something hangs on its MLP"):
        model_directions(backbone, num_samples=100)
    backbone = tiny_vit()
    backbone.module.blocks[2].norm1 = nn.RMSNorm(64)  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match="block 2 has a RMSNorm"):
        model_directions(backbone, num_samples=100)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"block": 4}, "blocks 0 to 3, got block=4"),
        ({"inputs": "norm"}, "inputs"),
        ({"num_deviations": 0.0}, "num_deviations is positive"),
        ({"min_tokens": 0}, "min_tokens is at least 1"),
        ({"temperature": float("inf")}, "temperature is positive"),
        ({"num_samples": 10}, "num_samples must exceed the width"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, object], words: str) -> None:
    backbone = tiny_vit()
    with pytest.raises(ValueError, match=words):
        regista.fix(backbone, "sinder", pictures(backbone), **config)  # type: ignore[arg-type]
