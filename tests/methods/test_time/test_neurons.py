"""Finding register neurons, against a loop over images, blocks, units and patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regista.backbones.tiny import tiny_vit
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.known_outliers import OutlierRule
from regista.methods.test_time import find_register_neurons, neurons
from regista.methods.test_time.neurons import neuron_scores, top_neurons
from tests.backbones.probes import randomise, unchanged
from tests.backbones.test_dinov2_hub import Dinov2HubBackbone, hub
from tests.backbones.test_transformers import MODELS, TransformersBackbone


def naive_scores(backbone: Any, images: Tensor, rule: OutlierRule, last_block: int) -> Tensor:
    """Everything materialised, then one patch and image after the other."""
    sites = [f"blocks.{block}.mlp_hidden" for block in range(last_block + 1)]
    totals: list[Tensor] = []
    for image in images.split(1):
        with torch.no_grad():
            features = backbone(image, [*sites, f"blocks.{rule.block}.resid"])
        tokens = features.layout.take(features.captured[f"blocks.{rule.block}.resid"], "patches").squeeze(0)
        sick = [patch for patch, token in enumerate(tokens) if float((token.double() ** 2).sum()) ** 0.5 > rule.cutoff]
        if not sick:
            continue
        per_block = []
        for site in sites:
            hidden = features.layout.take(features.captured[site], "patches").squeeze(0)
            summed = sum(hidden[patch].double() for patch in sick)
            per_block.append(summed / len(sick))
        totals.append(torch.stack(per_block))  # type: ignore[arg-type]
    return torch.stack(totals).mean(0)


def between(values: Tensor, share: float) -> float:
    """A number with this share of the values below it, well apart from its neighbours."""
    ordered = values.flatten().sort().values
    return float(ordered[int(share * len(ordered)) :][:2].mean())


def others() -> dict[str, Callable[[], Any]]:
    return {
        "swiglu": lambda: TransformersBackbone(randomise(MODELS["registers 4 swiglu"]()), name="swiglu"),
        "no cls": lambda: tiny_vit(num_register_tokens=2, class_token=False),
        "siglip": lambda: TransformersBackbone(randomise(MODELS["siglip vision"]()), name="siglip"),
        "hub": lambda: Dinov2HubBackbone(hub("xformers"), name="hub"),
    }


# Scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "last_block"), [(3, 2), (3, 3), (1, 3), (2, 0)])
def test_scores_are_the_naive_loop(sick: Any, images: Tensor, norms: Any, block: int, last_block: int) -> None:
    rule = OutlierRule(block, between(norms(sick, images, block), 0.9), 2)
    wanted = naive_scores(sick, images, rule, last_block)
    for batch_size in (1, 3, 7):
        got = neuron_scores(sick, images, rule, last_block, batch_size=batch_size)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", others())
def test_scores_of_other_models_are_the_naive_loop(kind: str, norms: Any) -> None:
    backbone = others()[kind]()
    images = torch.randn(4, 3, 5 * backbone.patch_size, 3 * backbone.patch_size)
    rule = OutlierRule(1, between(norms(backbone, images, 1), 0.6), 1)
    with unchanged(backbone.module):
        got = neuron_scores(backbone, images, rule, 1, batch_size=3)
    wanted = naive_scores(backbone, images, rule, 1)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_images_without_outliers_do_not_count(sick: Any, images: Tensor, norms: Any) -> None:
    largest = norms(sick, images, 1).amax(-1).sort().values
    rule = OutlierRule(1, float((largest[3] + largest[4]) / 2), 1)  # three of seven images have outliers
    assert int((norms(sick, images, 1) > rule.cutoff).any(-1).sum()) == 3
    wanted = naive_scores(sick, images, rule, 2)
    for batch_size in (2, 7):
        got = neuron_scores(sick, images, rule, 2, batch_size=batch_size)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_nothing_behind_what_is_read_is_computed(sick: Any, images: Tensor) -> None:
    ran: list[int] = []
    for index, sites in enumerate(sick.block_sites()):
        sites.block.register_forward_hook(lambda *_args, index=index: ran.append(index))
    neuron_scores(sick, images, OutlierRule(1, 0.0, 1), 0, batch_size=7)
    assert ran == [0, 1]


def test_padded_cells_are_no_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_vit()
    monkeypatch.setattr(neurons, "DiagnosisConfig", partial(DiagnosisConfig, policy="pad"))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (112, 56, 3), dtype=np.uint8))
    fitted = backbone.fit([picture], policy="pad")
    assert fitted.valid.any()
    assert not fitted.valid.all()
    with torch.no_grad():
        features = backbone(fitted.pixels, ["blocks.0.mlp_hidden"])
    hidden = features.layout.take(features.captured["blocks.0.mlp_hidden"], "patches")
    got = neuron_scores(backbone, [picture], OutlierRule(0, 0.0, 0), 0)
    torch.testing.assert_close(got, hidden[fitted.valid.flatten(1)].mean(0, keepdim=True), rtol=1e-5, atol=1e-5)


def test_half_precision_is_summed_in_float32(sick: Any, images: Tensor) -> None:
    rule = OutlierRule(3, 1.0, 2)
    wanted = neuron_scores(sick, images, rule, 2)
    half = neuron_scores(sick.to(dtype=torch.bfloat16), images, rule, 2)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, wanted, rtol=0.05, atol=0.05)


# The planted ones --------------------------------------------------------------------------


@pytest.mark.parametrize("last_block", [None, 2, 3])
def test_the_planted_neurons_are_on_top(sick: Any, images: Tensor, last_block: int | None) -> None:
    with unchanged(sick.module):
        found = find_register_neurons(sick, images, last_block=last_block)
    assert {neuron[:2] for neuron in found} == {(sick.planted.block, unit) for unit in sick.planted.neurons}
    more = find_register_neurons(sick, images, last_block=last_block, top_k=3)
    assert more[1][2] > 10 * more[2][2]


def test_the_result_does_not_depend_on_batches(sick: Any, images: Tensor) -> None:
    one, all_at_once = (find_register_neurons(sick, images, top_k=12, batch_size=size) for size in (1, 7))
    assert {neuron[:2] for neuron in one} == {neuron[:2] for neuron in all_at_once}  # the first two are level
    assert [neuron[2] for neuron in one] == pytest.approx([neuron[2] for neuron in all_at_once], rel=1e-5)
    scores = [score for *_, score in one]
    assert scores == sorted(scores, reverse=True)


def test_images_come_in_any_form(sick: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        np.asarray(Image.fromarray(rng.integers(0, 255, (5, 5, 3), dtype=np.uint8)).resize((112, 112)))
        for _ in range(6)
    ]
    for index, array in enumerate(arrays):
        Image.fromarray(array).save(tmp_path / f"{index}.png")
    forms: dict[str, Any] = {
        "arrays": arrays,
        "pictures": [Image.fromarray(array) for array in arrays],
        "generator": (Image.fromarray(array) for array in arrays),
        "paths": sorted(tmp_path.iterdir()),
        "folder": tmp_path,
        "generator of paths": (path for path in sorted(tmp_path.iterdir())),
        "uint8": torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2),
    }
    wanted = find_register_neurons(sick, sick.preprocess(arrays), top_k=5)
    assert wanted[0][1] in sick.planted.neurons
    for form, given in forms.items():
        found = find_register_neurons(sick, given, top_k=5)
        assert {neuron[:2] for neuron in found} == {neuron[:2] for neuron in wanted}, form
        assert [neuron[2] for neuron in found] == pytest.approx([neuron[2] for neuron in wanted], rel=1e-4), form


# Choosing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([[9.0, 8.0, 1.0], [0.5, 0.4, 0.3]], [(0, 0), (0, 1)]),  # the widest gap is 8 to 1
        ([[0.1, 3.0], [-2.0, 0.1]], [(0, 1)]),
        ([[1.0, 1.1], [1.2, 1.3]], [(1, 1), (1, 0), (0, 1), (0, 0)]),  # no gap of 1.25: all of them
        ([[5.0, 5.0], [5.0, 5.0]], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([[4.0]], [(0, 0)]),
        ([[3.0, 2.9, 0.1, 1e-9]], [(0, 0), (0, 1)]),
        ([[2.0, 0.0], [0.0, 0.0]], [(0, 0)]),
    ],
)
def test_the_widest_gap_ends_the_list(scores: list[list[float]], wanted: list[tuple[int, int]]) -> None:
    found = top_neurons(torch.tensor(scores), None)
    assert [neuron[:2] for neuron in found] == wanted
    assert [neuron[2] for neuron in found] == pytest.approx([scores[block][unit] for block, unit in wanted])


def test_at_most_a_hundred_without_a_gap() -> None:
    assert len(top_neurons(torch.linspace(1, 2, 400).view(4, 100), None)) == 100
    assert top_neurons(torch.rand(3, 5), 0) == []
    assert len(top_neurons(torch.rand(3, 5), 15)) == 15


# Mistakes ----------------------------------------------------------------------------------


def test_a_model_without_outliers_has_no_register_neurons(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"tiny shows no outlier tokens on these 7 images.*give a cutoff"):
        find_register_neurons(tiny_vit(), images)
    with pytest.raises(ValueError, match=r"no patch is above the cutoff 1e\+06 at block 1"):
        neuron_scores(tiny_vit(), images, OutlierRule(1, 1e6, 1), 1)


@pytest.mark.parametrize("last_block", [-1, 4])
def test_blocks_that_are_not_there_are_refused(sick: Any, images: Tensor, last_block: int) -> None:
    with pytest.raises(ValueError, match=f"blocks 0 to 3, got last_block={last_block}"):
        find_register_neurons(sick, images, last_block=last_block)


@pytest.mark.parametrize("top_k", [-1, 3 * 256 + 1])
def test_more_neurons_than_there_are_is_refused(sick: Any, images: Tensor, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k is 0 to 768, got {top_k}"):
        find_register_neurons(sick, images, top_k=top_k)


def test_a_given_cutoff_is_used(sick: Any, images: Tensor, norms: Any) -> None:
    cutoff = between(norms(sick, images, 3), 0.97)
    found = find_register_neurons(sick, images, cutoff=cutoff, top_k=3, last_block=2)
    assert found[0][1] in sick.planted.neurons
    with pytest.raises(ValueError, match="cutoff is a positive norm"):
        find_register_neurons(sick, images, cutoff=-1.0)
    for wrong in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cutoff is a positive norm"):
            find_register_neurons(sick, images, cutoff=wrong, last_block=2)
