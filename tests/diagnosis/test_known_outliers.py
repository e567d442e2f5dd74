"""A rule learned on one model, applied to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regista
from regista.backbones.tiny import tiny_vit
from regista.diagnosis.known_outliers import SAMPLED, OutlierRule, outlier_count, outlier_rule, some_of
from tests.backbones.planting import SOUTH


@pytest.fixture(scope="module")
def sick() -> Any:
    return regista.load("tiny-planted")


def test_the_rule_finds_what_was_planted(sick: Any) -> None:
    images = SOUTH.images(6)
    rule = outlier_rule(sick, images)
    planted = sick.planted.mask(images).flatten(1)
    assert rule.onset == sick.planted.block
    assert torch.equal(rule.mask(sick, images), planted)
    assert rule.count == int(planted.sum()) == outlier_count(sick, images, rule, batch_size=4)
    assert rule.share == pytest.approx(float(planted.float().mean()))
    assert OutlierRule(**rule.to_dict()) == rule


def test_a_healthy_model_has_no_rule() -> None:
    with pytest.raises(ValueError, match="shows no outlier tokens on these 6 images"):
        outlier_rule(tiny_vit(), SOUTH.images(6))


def test_some_of(tmp_path: Path) -> None:
    many = torch.arange(100.0)
    few = some_of(many)
    assert len(few) == SAMPLED
    assert (few[0], few[-1]) == (0, 99)
    assert len(set(few.tolist())) == SAMPLED
    assert some_of(many, 200) is many
    for index in range(5):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f"{index}.png")
    assert [path.stem for path in some_of(tmp_path, 3)] == ["0", "2", "4"]
    image = Image.new("RGB", (8, 8))
    assert some_of(image) == [image]
