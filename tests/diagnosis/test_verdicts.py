"""The verdict follows its written rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regista.diagnosis.verdicts import Facts, describe_reference, holds_outliers, judge, percent

SICK = Facts(0.023, sink_mass=0.31, others=None, former=0.31, cost=1.0)
CURED = Facts(0.0, sink_mass=0.002, others=0.998, former=0.87, cost=1.004)
CASES = {
    "all gone": (SICK, CURED, "cured"),
    "without denoised features": (SICK, replace(CURED, former=None), "cured"),
    "without attention": (replace(SICK, sink_mass=None), replace(CURED, sink_mass=None), "cured"),
    "half left": (SICK, replace(CURED, outlier_share=0.0115), "fewer artifacts"),
    "sinks stay": (SICK, replace(CURED, sink_mass=0.3), "fewer artifacts"),
    "former cells no closer": (SICK, replace(CURED, former=0.30), "fewer artifacts"),
    "former cells cannot be judged": (replace(SICK, former=0.8), replace(CURED, former=0.3), "cured"),
    "features unknown": (SICK, replace(CURED, others=None), "fewer artifacts"),
    "other patches changed": (SICK, replace(CURED, others=0.89), "changed"),
    "other patches just kept": (SICK, replace(CURED, others=0.9), "cured"),
    "more than half left": (SICK, replace(SICK, outlier_share=0.012, sink_mass=0.2, others=1.0), "no gain"),
    "the same": (SICK, replace(SICK, others=1.0), "no gain"),
    "nothing to cure": (Facts(0.0, 0.01), Facts(0.0, 0.04, others=0.99), "no gain"),
    "outliers come": (Facts(0.0, 0.01), Facts(0.004, 0.01, others=0.99), "worse"),
    "outliers grow": (Facts(0.02), Facts(0.03, others=1.0), "worse"),
    "outliers grow a little": (Facts(0.02), Facts(0.029, others=1.0), "no gain"),
    "sinks instead of outliers": (Facts(0.02, 0.0), Facts(0.0, 0.08, others=0.95), "mixed"),
    "sinks about the limit": (Facts(0.0, 0.049), Facts(0.0, 0.051, others=1.0), "no gain"),
}


@pytest.mark.parametrize(("reference", "model", "wanted"), CASES.values(), ids=CASES)
def test_rules(reference: Facts, model: Facts, wanted: str) -> None:
    assert judge(reference, model).verdict == wanted


def test_sentence_has_the_numbers() -> None:
    assert judge(SICK, CURED).sentence == (
        "outliers 2.3 % -> 0.0 %, sinks 31.0 % -> 0.2 % of attention, other patches unchanged (cosine 0.998), "
        "former outlier cells closer to denoised features (cosine 0.31 -> 0.87), 1.00x the cost"
    )
    assert "nearly unchanged (cosine 0.950)" in judge(SICK, replace(CURED, others=0.95)).sentence
    assert "other patches changed (cosine 0.120)" in judge(SICK, replace(CURED, others=0.12)).sentence
    assert "no closer to denoised features (cosine 0.31 -> 0.30)" in judge(SICK, replace(CURED, former=0.3)).sentence
    unlike = replace(CURED, others=None, former=None, reason="its features have 64 channels")
    assert "features not compared: its features have 64 channels" in judge(SICK, unlike).sentence
    clean = judge(Facts(0.0, 0.01), Facts(0.0, 0.01, others=0.97))
    assert clean.sentence == (
        "nothing to cure: no outliers and no attention sinks in either, all patches nearly unchanged (cosine 0.970)"
    )


def test_what_was_not_measured_is_not_said() -> None:
    sentence = judge(Facts(0.02), Facts(0.0)).sentence
    assert sentence == "outliers 2.0 % -> 0.0 %"
    said = judge(replace(SICK, former=0.8), replace(CURED, former=0.3)).sentence
    assert "denoised" not in said


def test_noise_is_called_noise() -> None:
    assert judge(SICK, replace(CURED, cost=1.04, cost_range=(0.98, 1.09))).sentence.endswith(
        "1.04x the cost (within noise)"
    )
    assert judge(SICK, replace(CURED, cost=1.04, cost_range=(1.02, 1.09))).sentence.endswith("1.04x the cost")


def test_reference_and_shares_in_words() -> None:
    assert describe_reference(SICK) == "outliers 2.3 %, sinks take 31.0 % of attention"
    assert describe_reference(Facts(0.0, 0.04)) == "no outliers, no attention sinks"
    assert describe_reference(Facts(0.0)) == "no outliers"
    assert [percent(share) for share in (0.0, 0.0002, 0.0005, 0.5)] == ["0.0 %", "under 0.1 %", "0.1 %", "50.0 %"]


def test_denoised_features_that_still_hold_outliers() -> None:
    assert [holds_outliers(cosine) for cosine in (None, 0.49, 0.5, 0.9)] == [False, False, True, True]
