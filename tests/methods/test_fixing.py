"""``regista.fix``: what it asks for, what it refuses, what it writes down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import regista
from regista.backbones.tiny import tiny_vit
from regista.methods import fixing
from regista.methods.fixing import chosen_method
from regista.methods.protocol import State, Workspace, method_class, method_names
from tests.backbones.probes import pictures, unchanged


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{index}.png" for index in range(5)]
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)).resize((112, 112)).save(path)
    return paths


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_c": 3}, r"method 'test_time' has no setting 'top_c' \(did you mean 'top_k'\?\); it has: top_k, cutoff"),
        ({"zzz": 3}, r"method 'test_time' has no setting 'zzz'; it has"),
        ({"top_k": "ten"}, "method 'test_time': top_k wants a whole number or None, got 'ten'"),
        ({"top_k": 2.5}, "top_k wants a whole number or None, got 2.5"),
        ({"registers": True}, "registers wants a whole number, got True"),
        ({"variant": "mine"}, "variant wants 'paper' or 'released', got 'mine'"),
        ({"top_k": -1}, "top_k is a number of neurons"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_done(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regista.fix("no such model", "test_time", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "denoise", "registers": 4}, "'phreg' has no use for registers beside mode=denoise"),
        ({"mode": "denoise", "num_views": 3, "lr": 1e-4}, "no use for lr beside mode=denoise, num_views=3"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regista.fix("no such model", "phreg", **settings)


def test_weights_that_are_not_finite_are_refused() -> None:
    broken = tiny_vit()
    with torch.no_grad():
        broken.module.blocks[1].mlp.fc1.weight[3, 4] = float("nan")  # type: ignore[index, union-attr]
    for method in ("trained", "last"):
        with pytest.raises(ValueError, match=r"1 of \d+ values of 'blocks.1.mlp.fc1.weight' are NaN"):
            regista.fix(broken, method)


@pytest.mark.parametrize("name", method_names())
def test_the_outline_is_of_the_kind_that_comes_out(name: str, sick: Any, photos: list[Path]) -> None:
    settings: dict[str, Any] = {"phreg": {"epochs": 1, "num_views": 2, "held_out": 0.4, "lr": 1e-5}}.get(name, {})
    method = chosen_method(name, settings)
    with unchanged(sick.module):
        outline = method.outline(sick)
    try:
        fixed = regista.fix(sick, name, photos, **settings)
    except ValueError as error:  # images of noise may show no defect
        pytest.skip(str(error))
    assert outline.needs_regista == fixed.needs_regista
    assert outline.layout().segments == fixed.layout().segments


def test_what_is_to_be_careful_about_is_in_the_notes(sick: Any, images: Tensor) -> None:
    assert (
        "fitted on 7 images only: use a few dozen of the kind you care about"
        in regista.fix(sick, "test_time", images).notes
    )
    assert any("fitted on one image" in note for note in regista.fix(sick, "test_time", images[:1], top_k=2).notes)
    assert any("register stays idle" in note for note in regista.fix(sick, "test_time", images, top_k=0).notes)
    low = regista.fix(sick, "neighbour_average", images, cutoff=1.0, block=2)
    assert any("count as outliers, more than a tenth" in note for note in low.notes)
    many = regista.fix(sick, "trained", registers=300)
    assert any(note.startswith("300 registers beside ") for note in many.notes)
    assert not any("beside" in note for note in regista.fix(sick, "trained", registers=4).notes)


def test_unknown_methods_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'test_time'"):
        regista.fix(tiny_vit(), "testtime")
    with pytest.raises(ValueError, match="unknown model 'tinny'"):
        regista.fix("tinny", "trained")


def test_images_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"'test_time' needs images: fix\(backbone, 'test_time', images\)"):
        regista.fix(tiny_vit(), "test_time")
    with pytest.raises(ValueError, match="got no images"):
        regista.fix(tiny_vit(), "test_time", [])


def test_history_and_name_grow_and_the_truth_about_planted_outliers_goes(sick: Any, images: Tensor) -> None:
    with unchanged(sick.module):
        once = regista.fix(sick, "test_time", images, top_k=1)
        twice = regista.fix(once, "trained", registers=2)
    assert sick.history == []
    assert sick.planted is not None
    assert [entry["method"] for entry in once.history] == ["test_time"]
    assert [entry["method"] for entry in twice.history] == ["test_time", "trained"]
    assert once.history[0]["config"]["top_k"] == 1
    assert (once.name, twice.name) == ("tiny-planted+test_time", "tiny-planted+test_time+trained")
    assert (once.planted, twice.planted) == (None, None)
    assert twice.num_register_tokens == 3


def test_a_second_cure_keeps_the_first_at_work(sick: Any, images: Tensor, norms: Any) -> None:
    once = regista.fix(sick, "test_time", images)
    twice = regista.fix(once, "trained", registers=2)
    with twice.hiding_registers(keep=1):
        hidden = twice(images)
    # A hidden register may still have the largest activation where no patch fires.
    torch.testing.assert_close(hidden.patches, once(images).patches, rtol=1e-3, atol=1e-3)
    assert (twice(images).patches - hidden.patches).abs().max() > 0.01
    mask = sick.planted.mask(images).flatten(1)
    assert norms(twice, images, 3)[mask].median() < 0.4 * norms(sick, images, 3)[mask].median()


def test_what_load_takes_is_taken(sick: Any, images: Tensor, tmp_path: Path) -> None:
    folder = sick.save_pretrained(tmp_path / "sick")
    wanted = regista.fix(sick, "test_time", images)(images).tokens
    for given in (sick.module, str(folder), folder, "tiny-planted"):
        torch.testing.assert_close(regista.fix(given, "test_time", images)(images).tokens, wanted)


def test_images_that_come_one_by_one_can_be_looked_at_twice(sick: Any) -> None:
    arrays = [(image * 60 + 120).clamp(0, 255).byte().permute(1, 2, 0).numpy() for image in pictures(sick, 4)]
    assert regista.fix(sick, "test_time", (array for array in arrays)).history


def test_a_workspace_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(method_class("trained")):  # type: ignore[misc]
        def fit(self, backbone: Any, images: Any = None, **options: Any) -> State:
            seen.append(options["workspace"])
            return super().fit(backbone, images)  # type: ignore[no-any-return]

    monkeypatch.setattr(fixing, "method_class", lambda _name: Looking)
    own = Workspace(tmp_path, resume=True)
    for given in (None, str(tmp_path), tmp_path, own):
        regista.fix(tiny_vit(), "trained", workspace=given)
    assert seen == [None, Workspace(tmp_path), Workspace(tmp_path), own]
