"""The neighbour average as a method: what it finds, and what is left of the outliers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regista
from regista.backbones.tiny import tiny_vit
from tests.backbones.naive_repair import averaged
from tests.backbones.probes import close, pictures
from tests.methods.defective import BLOCK, defective_vit, truth

CELLS = ((0, 3), (4, 6))  # one on the border


def test_outliers_are_gone_and_the_rest_stays() -> None:
    sick, _ = defective_vit(CELLS)
    fitting, others = (pictures(sick, 6, sick.image_size, seed) for seed in (0, 1))
    cured = regista.fix(sick, "neighbour-average", fitting)
    before, after = regista.diagnose(sick, others), regista.diagnose(cured, others)
    assert torch.equal(before.outliers, truth(CELLS, 6))
    assert "high-norm" in before.kinds
    assert "high-norm" not in after.kinds
    assert float(after.norms[:, BLOCK:].max()) < 0.2 * float(before.norms[:, BLOCK].max())
    assert torch.equal(after.norms[:, :BLOCK], before.norms[:, :BLOCK])
    site = f"blocks.{BLOCK}.resid"
    with torch.no_grad():
        old, new = (model(others, site).captured[site] for model in (sick, cured))
    layout = sick.layout()
    (found,) = cured.history
    for image in range(6):
        old_map, new_map = (layout.take(x[image], "patches").unflatten(0, layout.grid_size) for x in (old, new))
        close(new_map, averaged(old_map, found["state"]["cutoff"]), 1e-5)
        assert torch.equal(new_map[~truth(CELLS)[0]], old_map[~truth(CELLS)[0]])


def test_what_is_found_is_told() -> None:
    sick, _ = defective_vit(CELLS)
    images = pictures(sick, 6, sick.image_size)
    (entry,) = regista.fix(sick, "neighbour_average", images).history
    state = entry["state"]
    assert state["block"] == BLOCK
    assert state["share"] == pytest.approx(2 / 64)
    assert state["images"] == 6
    norms = regista.diagnose(sick, images).norms[:, BLOCK]
    outliers = truth(CELLS, 6)
    assert float(norms[~outliers].max()) < state["cutoff"] < float(norms[outliers].min())


def test_settings_come_first() -> None:
    sick, _ = defective_vit(CELLS)
    images = pictures(sick, 4, sick.image_size)
    for wanted, config in (
        ((2, None), {"block": 2}),
        ((BLOCK, 30.0), {"cutoff": 30.0}),
        ((3, 50), {"block": 3, "cutoff": 50}),
    ):
        (entry,) = regista.fix(sick, "neighbour_average", images, **config).history  # type: ignore[arg-type]
        block, cutoff = wanted
        assert entry["state"]["block"] == block
        assert cutoff is None or entry["state"]["cutoff"] == cutoff


def test_it_is_saved(tmp_path: Path) -> None:
    sick, _ = defective_vit(CELLS)
    images = pictures(sick, 4, sick.image_size)
    cured = regista.fix(sick, "neighbour_average", images, kernel="gaussian")
    again = regista.load(cured.save_pretrained(tmp_path / "model"))
    assert torch.equal(again(images).tokens, cured(images).tokens)
    assert again.history == cured.history
    assert not torch.equal(cured(images).tokens, sick(images).tokens)


def test_a_healthy_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no outlier tokens in any block on these 4 images"):
        regista.fix(tiny_vit(), "neighbour_average", pictures(tiny_vit(), 4))
    sick, _ = defective_vit(CELLS)
    images = pictures(sick, 4, sick.image_size)
    with pytest.raises(ValueError, match="no outlier tokens at block 0 on these 4 images"):
        regista.fix(sick, "neighbour_average", images, block=0)
    with pytest.raises(ValueError, match="at block 1"):
        regista.fix(sick, "neighbour_average", images, block=1, cutoff=1e6)


def test_wrong_settings_are_refused() -> None:
    backbone = tiny_vit()
    with pytest.raises(ValueError, match="blocks 0 to 3, got block=4"):
        regista.fix(backbone, "neighbour_average", pictures(backbone), block=4)
    with pytest.raises(ValueError, match="kernel"):
        regista.fix(backbone, "neighbour_average", pictures(backbone), kernel="round")
    with pytest.raises(ValueError, match="cutoff is a positive norm"):
        regista.fix(backbone, "neighbour_average", pictures(backbone), cutoff=-1.0)
    with pytest.raises(ValueError, match="needs images"):
        regista.fix(backbone, "neighbour_average")
