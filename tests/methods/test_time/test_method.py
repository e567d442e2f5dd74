"""Test-time registers as a method: what it chooses, and what the cured model shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista.backbones.attention_bias import AttentionBias
from regista.backbones.register_neurons import RegisterNeurons
from regista.backbones.tiny import tiny_vit
from regista.diagnosis import diagnose
from regista.methods.test_time import method
from regista.methods.test_time.config import TestTimeConfig
from regista.methods.test_time.method import TestTime, mean_key_value
from tests.backbones.probes import close, pictures, randomise, unchanged
from tests.backbones.test_transformers import MODELS, TransformersBackbone

FORMS = ("token", "attention-bias")


# What the cured model shows ----------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("form", FORMS)
def test_outliers_are_gone(sick: Any, images: Tensor, norms: Any, form: str, variant: str) -> None:
    assert "high-norm" in diagnose(sick, images).kinds
    cured = regista.fix(sick, "test_time", images, form=form, variant=variant)
    assert "high-norm" not in diagnose(cured, images).kinds
    mask = sick.planted.mask(images).flatten(1)
    before, after = norms(sick, images, 3), norms(cured, images, 3)
    assert (before[mask] / before[~mask].median()).median() > 5
    assert (after[mask] / after[~mask].median()).median() < 2
    assert cured.num_register_tokens == (1 if form == "token" else 0)


def test_the_register_has_what_the_outliers_had(sick: Any, images: Tensor, norms: Any) -> None:
    cured = regista.fix(sick, "test_time", images)
    features = cured(images, ["blocks.3.resid"])
    (register,) = features.layout.take(features.captured["blocks.3.resid"], "registers").norm(dim=-1).unbind(1)
    assert (register > 5 * norms(cured, images, 3).median(-1).values).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_three_equals_three_of_one(sick: Any, images: Tensor, form: str) -> None:
    cured = regista.fix(sick, "test_time", images, form=form)
    three = images.narrow(0, 0, 3)
    batch = cured(three).tokens
    for index, image in enumerate(three.split(1)):
        close(cured(image).tokens, batch.narrow(0, index, 1), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_saved_and_read(sick: Any, images: Tensor, form: str, tmp_path: Any) -> None:
    cured = regista.fix(sick, "test_time", images, form=form)
    again = regista.load(cured.save_pretrained(tmp_path / "cured"))
    assert torch.equal(again(images).tokens, cured(images).tokens)
    assert again.history == json.loads(json.dumps(cured.history)) == cured.history
    assert again.planted is None


def test_without_neurons_a_register_is_all_that_is_added(sick: Any, images: Tensor) -> None:
    cured = regista.fix(sick, "test_time", images, top_k=0)
    wanted = sick.with_registers(torch.zeros(1, sick.embed_dim))
    close(cured(images).tokens, wanted(images).tokens, 0)
    with cured.hiding_registers():
        close(cured(images).patches, sick(images).patches, 1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_several_registers_all_receive(sick: Any, images: Tensor, count: int) -> None:
    cured = regista.fix(sick, "test_time", images, registers=count)
    registers = cured(images).registers
    assert registers.shape[1] == count
    close(registers, registers.narrow(1, 0, 1).expand(-1, count, -1), 1e-5)


def test_trained_registers_stay_what_they_are(images: Tensor) -> None:
    backbone = tiny_vit(num_register_tokens=2)
    cured = TestTime(TestTimeConfig(top_k=4, cutoff=1.0, last_block=1)).fit(backbone, images)
    new = TestTime(TestTimeConfig()).apply(backbone, cured)
    assert new.num_register_tokens == 3
    (addition,) = new.additions
    assert isinstance(addition, RegisterNeurons)
    assert addition.num_test_time == 1
    table, old = new.register_table(), backbone.register_table()
    assert table is not None
    assert old is not None
    assert torch.equal(table.narrow(1, 0, 2), old)
    assert not table.narrow(1, 2, 1).any()


@pytest.mark.parametrize("kind", ["clip", "siglip", "registers 4 swiglu", "dinov3 4"])
@pytest.mark.parametrize("form", FORMS)
def test_models_of_other_libraries(kind: str, form: str) -> None:
    backbone = TransformersBackbone(randomise(MODELS[kind](), scale=0.5), name=kind)
    images = pictures(backbone, 4)
    with unchanged(backbone.module):
        cured = regista.fix(backbone, "test_time", images, top_k=5, cutoff=1.0, form=form, last_block=1)
    assert cured.num_register_tokens == backbone.num_register_tokens + (form == "token")
    assert (cured(images).patches - backbone(images).patches).abs().max() > 1e-4
    assert len(cured.history[0]["state"]["neurons"]) == 5


# How many neurons --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        ({}, 2),  # the two above the gap are enough
        ({2: 20}, 10),
        ({2: 20, 10: 15, 20: 3}, 45),
        ({2: 20, 10: 15, 20: 2}, 20),  # a tenth of twenty may be left
        ({2: 20, 10: 9, 20: 12, 45: 9, 100: 30}, 10),  # none is enough: the fewest of the best
    ],
)
def test_the_fewest_neurons_that_are_enough(
    sick: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch, left: dict[int, int], wanted: int
) -> None:
    asked: list[int] = []

    def counted(cured: Any, *_rest: Any) -> int:
        (addition,) = cured.additions
        asked.append(sum(len(units) for units in addition.neurons.values()))
        return left.get(asked[-1], 0)

    monkeypatch.setattr(method, "outlier_count", counted)
    rule = method.outlier_rule(sick, images)
    monkeypatch.setattr(method, "outlier_rule", lambda *_args, **_options: type(rule)(3, rule.cutoff, 2, 20))
    seen: list[tuple[str, int, int]] = []
    state = TestTime().fit(sick, images, progress=lambda *step: seen.append(step))
    assert len(state.record["neurons"]) == wanted
    assert asked == sorted(asked)
    assert state.record["outliers"] == 20
    assert state.record["outliers_left"] == left.get(wanted, 0)
    assert [done for _, done, _ in seen] == list(range(1, len(asked) + 1))


def test_few_are_tried_before_the_many_of_a_missing_gap(
    sick: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method, "neuron_scores", lambda *_args, **_options: torch.linspace(1, 1.2, 768).view(3, 256))
    monkeypatch.setattr(method, "outlier_count", lambda *_args: 0)
    assert len(TestTime().fit(sick, images).record["neurons"]) == 10


def test_a_model_with_few_units_is_no_problem(sick: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "neuron_scores", lambda *_args, **_options: torch.linspace(1, 1.2, 12).view(1, 12))
    monkeypatch.setattr(method, "outlier_count", lambda *_args: 99)
    assert len(TestTime().fit(sick, images).record["neurons"]) == 10


def test_a_number_that_is_given_is_taken(sick: Any, images: Tensor) -> None:
    state = TestTime(TestTimeConfig(top_k=7)).fit(sick, images)
    assert len(state.record["neurons"]) == 7
    assert state.record["onset_block"] == sick.planted.block
    assert "outliers_left" not in state.record
    json.dumps(state.record)


# The constant key --------------------------------------------------------------------------


def test_the_mean_key_and_value_are_the_naive_loop(sick: Any, images: Tensor) -> None:
    cured = regista.fix(sick, "test_time", images, registers=2)
    keys, values = mean_key_value(cured, images, 3)
    assert keys.shape == values.shape == (4, 4, 16)
    for kind, got in (("k", keys), ("v", values)):
        for block in range(4):
            site = f"blocks.{block}.{kind}"
            total = torch.zeros(4, 16, dtype=torch.float64)
            for image in images.split(1):
                features = cured(image, [site])
                *_, last = features.layout.take(features.captured[site], "registers").detach().unbind(2)
                total += last.squeeze(0).double()
            torch.testing.assert_close(got.unbind(0)[block].double(), total / len(images), rtol=1e-5, atol=1e-5)


def test_the_constant_key_stands_in_for_the_register(sick: Any, images: Tensor) -> None:
    token = regista.fix(sick, "test_time", images)
    bias = regista.fix(sick, "test_time", images, form="attention-bias")
    neurons, key = bias.additions
    assert isinstance(neurons, RegisterNeurons)
    assert isinstance(key, AttentionBias)
    assert neurons.num_test_time == 0
    assert bias.layout() == sick.layout()
    nearer = (bias(images).patches - token(images).patches).norm()
    assert nearer < 0.5 * (sick(images).patches - token(images).patches).norm()


# Settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": -1}, "top_k is a number of neurons"),
        ({"registers": 0}, "registers is at least 1"),
        ({"variant": "mine"}, "'paper' or 'released'"),
        ({"form": "tokens"}, "'token' or 'attention-bias'"),
        ({"batch_size": 0}, "batch_size is at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TestTimeConfig(**settings)


def test_a_clean_model_is_told_so(images: Tensor) -> None:
    with pytest.raises(ValueError, match="tiny shows no outlier tokens"):
        regista.fix(tiny_vit(), "test_time", images)
