"""Cosines between models, against numpy cell by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.tiny import tiny_vit
from regista.diagnosis.agreement import compare_features, split_agreement, why_not
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.source import ImageSource
from regista.tokens import TokenLayout


def images(count: int, size: tuple[int, int] = (84, 70)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def smoothed(backbone: Backbone, pixels: Tensor) -> Tensor:
    """Stands for denoised features: the mean of the features of an image and of a dimmer one."""
    return (backbone(pixels).patches + backbone(pixels * 0.9).patches) / 2


def compared(models: list[Any], pixels: Tensor, outliers: Tensor, batch_size: int = 2, **options: Any) -> list[Any]:
    config = DiagnosisConfig(batch_size=batch_size)
    return compare_features(models, [ImageSource(model, pixels, config) for model in models], outliers, **options)


def test_statistics_of_two_kinds_of_cells() -> None:
    draw = np.random.default_rng(0)
    cosine, outliers, valid = draw.uniform(-1, 1, (3, 5, 7)), draw.random((3, 5, 7)) < 0.2, draw.random((3, 5, 7)) < 0.8
    found = split_agreement(*(torch.from_numpy(values) for values in (cosine, outliers, valid)))
    for likeness, cells in ((found.former_outliers, outliers & valid), (found.others, valid & ~outliers)):
        assert likeness is not None
        assert likeness.mean == pytest.approx(cosine[cells].mean())
        assert likeness.p05 == pytest.approx(np.quantile(cosine[cells], 0.05))
        assert likeness.cells == cells.sum()
    nothing = split_agreement(torch.ones(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 2).bool())
    assert nothing.former_outliers is None
    assert nothing.others is not None
    assert nothing.to_dict()["others"] == {"mean": 1.0, "p05": 1.0, "cells": 4}


@torch.no_grad()
def test_cosines_are_those_of_the_features() -> None:
    models, pixels = [tiny_vit(), tiny_vit(seed=1)], images(5)
    outliers = torch.zeros(5, 6, 5, dtype=torch.bool)
    outliers.flatten(1).scatter_(1, torch.tensor([[3], [7], [7], [0], [29]]), value=True)
    first, second = compared(models, pixels, outliers, denoise=smoothed)
    assert first.to_reference is None
    for found, others in (
        (second.to_reference, models[0](pixels).patches),
        (second.to_denoised, smoothed(models[0], pixels)),
    ):
        wanted = torch.cosine_similarity(models[1](pixels).patches, others, dim=-1)
        mask = outliers.flatten(1)
        assert found.former_outliers.mean == pytest.approx(float(wanted[mask].mean()), abs=1e-5)
        assert found.others.mean == pytest.approx(float(wanted[~mask].mean()), abs=1e-5)
        assert (found.former_outliers.cells, found.others.cells) == (5, 145)
    own = torch.cosine_similarity(models[0](pixels).patches, smoothed(models[0], pixels), dim=-1)
    assert first.to_denoised.others.mean == pytest.approx(float(own[~outliers.flatten(1)].mean()), abs=1e-5)
    assert second.pictured.shape == (5, 30, 64)


def test_batches_do_not_matter() -> None:
    models, pixels, none = [tiny_vit(), tiny_vit(seed=1)], images(3), torch.zeros(3, 6, 5, dtype=torch.bool)
    whole, single = (compared(models, pixels, none, size, denoise=smoothed) for size in (3, 1))
    for one, other in zip(whole, single, strict=True):
        assert torch.allclose(one.pictured, other.pictured, atol=1e-5)
        assert one.to_denoised.others.mean == pytest.approx(other.to_denoised.others.mean, abs=1e-5)
    assert whole[1].to_reference.others.p05 == pytest.approx(single[1].to_reference.others.p05, abs=1e-5)


def test_padded_cells_are_left_out() -> None:
    photo = np.random.default_rng(0).integers(0, 255, (40, 84, 3), dtype=np.uint8)
    config = DiagnosisConfig(image_size=[84, 84], policy="pad")
    models = [tiny_vit(), tiny_vit(seed=1)]
    sources = [ImageSource(model, [photo], config) for model in models]
    _, found = compare_features(models, sources, torch.zeros(1, 6, 6, dtype=torch.bool))
    assert found.to_reference is not None
    assert found.to_reference.others is not None
    assert found.to_reference.others.cells == 18


def test_unlike_models_get_a_reason() -> None:
    models = [tiny_vit(), tiny_vit(embed_dim=32), tiny_vit(num_register_tokens=3)]
    done: list[int] = []
    none = torch.zeros(3, 6, 5, dtype=torch.bool)
    _, narrow, registers = compared(models, images(3), none, progress=done.append)
    assert narrow.reason == "its features have 32 channels, the reference's 64"
    assert narrow.to_reference is narrow.to_denoised is narrow.pictured is None
    assert registers.reason == ""
    assert registers.to_reference.others.cells == 90
    assert done == [2, 3]
    big, small = TokenLayout.of((8, 7), 14), TokenLayout.of((4, 5), 16)
    said = why_not(big, small, (64, 32))
    assert (
        said == "its patch grid is 4 x 5, the reference's 8 x 7 and its features have 32 channels, the reference's 64"
    )


def test_denoise_must_fit() -> None:
    models, none = [tiny_vit(), tiny_vit()], torch.zeros(1, 6, 5, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"denoise gives patch features \(1, 30, 64\) like the model, got \(1, 3, 64\)"
    ):
        compared(models, images(1), none, denoise=lambda backbone, pixels: torch.zeros(1, 3, 64))
