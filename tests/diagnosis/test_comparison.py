"""Several models on the same images: each is diagnosed as if alone, and judged against the first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

import regista
from regista.backbones.tiny import tiny_vit
from regista.diagnosis import Comparison, compare, diagnose
from regista.diagnosis.config import DiagnosisConfig
from regista.results import RunFolder


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.rand(4, 3, 112, 112, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def found(pixels: Tensor) -> Comparison:
    sick, clean = regista.load("tiny-planted"), regista.load("tiny")
    return compare([sick, clean, sick, tiny_vit(embed_dim=32)], pixels, batch_size=3, timed_rounds=0)


def test_verdicts(found: Comparison) -> None:
    assert [model.verdict for model in found.models] == ["reference", "cured", "no gain", "fewer artifacts"]
    sick, clean, same, narrow = found.models
    assert clean.to_reference is not None
    assert clean.to_reference.others is not None
    assert clean.to_reference.others.mean > 0.99
    assert clean.to_reference.former_outliers is not None
    assert clean.to_reference.former_outliers.mean < 0.5
    assert same.to_reference is not None
    assert same.to_reference.former_outliers is not None
    assert same.to_reference.former_outliers.mean == pytest.approx(1)
    assert narrow.reason
    assert narrow.reason in narrow.sentence
    assert sick.to_reference is None
    assert found.reference is sick
    assert [model.throughput for model in found.models] == [None] * 4
    assert "cost" not in clean.sentence


def test_the_other_way_round_is_worse(pixels: Tensor) -> None:
    _, planted = compare([tiny_vit(), "tiny-planted"], pixels, timed_rounds=0).models
    assert planted.verdict == "worse"
    assert planted.sentence.startswith("outliers 0.0 % -> ")


def test_diagnoses_are_those_of_each_alone(found: Comparison, pixels: Tensor) -> None:
    for model, spec in zip(found.models, ("tiny-planted", "tiny"), strict=False):
        alone = diagnose(spec, pixels)
        own = model.diagnosis
        assert (own.verdict, own.kinds, own.share) == (alone.verdict, alone.kinds, alone.share)
        assert torch.equal(own.outliers, alone.outliers)
        assert torch.allclose(own.norms, alone.norms, atol=1e-4)
    assert found.models[1].parameters == sum(weight.numel() for weight in regista.load("tiny").module.parameters())


def test_norms_are_pictured_at_the_same_block(found: Comparison) -> None:
    sick, clean, *_ = found.models
    assert sick.norm_block == sick.diagnosis.outlier_block
    assert clean.diagnosis.outlier_block is None
    assert clean.norm_block == sick.norm_block
    wanted = clean.diagnosis.norms[:, sick.norm_block]
    np.testing.assert_array_equal(clean.diagnosis.arrays["norm_maps"], wanted.numpy())


def test_colours_are_fitted_on_the_healthy_patches_of_the_reference(found: Comparison, pixels: Tensor) -> None:
    sick, clean, _, narrow = found.models
    assert [model.shared_pca for model in found.models] == [True, True, True, False]
    features = regista.load("tiny-planted")(pixels).patches.detach().double().flatten(0, 1).numpy()
    healthy = features[~sick.diagnosis.outliers.flatten().numpy()]
    pca = PCA(3, svd_solver="full").fit(healthy)
    scores = pca.transform(healthy)
    signs = np.where((scores**3).sum(0) < 0, -1, 1)
    low, high = np.percentile(scores * signs, [1, 99], axis=0)
    cured = regista.load("tiny")(pixels).patches.detach().double().flatten(0, 1).numpy()
    wanted = ((pca.transform(cured) * signs - low) / (high - low)).clip(0, 1)
    np.testing.assert_allclose(clean.diagnosis.arrays["pca_maps"].reshape(-1, 3), wanted, atol=1e-3)
    alone = diagnose(tiny_vit(embed_dim=32), pixels).arrays["pca_maps"]
    np.testing.assert_allclose(narrow.diagnosis.arrays["pca_maps"], alone, atol=1e-3)


def test_unlike_features_keep_colours_of_their_own(pixels: Tensor) -> None:
    _, other = compare([tiny_vit(), tiny_vit(seed=5)], pixels, timed_rounds=0).models
    assert not other.shared_pca
    alone = diagnose(tiny_vit(seed=5), pixels).arrays["pca_maps"]
    np.testing.assert_allclose(other.diagnosis.arrays["pca_maps"], alone, atol=1e-3)


def test_denoised_features_and_what_they_are_no_judge_of(pixels: Tensor) -> None:
    clean = tiny_vit()
    true = compare(
        ["tiny-planted", clean], pixels, timed_rounds=0, denoise=lambda backbone, given: clean(given).patches
    )
    cured = true.models[1]
    assert cured.verdict == "cured"
    assert "former outlier cells closer to denoised features" in cured.sentence
    assert cured.to_denoised is not None
    assert cured.to_denoised.former_outliers is not None
    assert cured.to_denoised.former_outliers.mean == pytest.approx(1)
    assert true.notes == ()
    useless = compare(
        ["tiny-planted", clean], pixels, timed_rounds=0, denoise=lambda backbone, given: backbone(given).patches
    )
    assert useless.models[1].verdict == "cured"
    assert "denoised" not in useless.models[1].sentence
    assert "still hold the outliers of tiny-planted (cosine 1.00)" in useless.notes[0]


def test_every_model_gets_the_same_pixels() -> None:
    raw = torch.rand(2, 3, 112, 112, generator=torch.Generator().manual_seed(2))
    first, second = tiny_vit(), tiny_vit()
    second.mean, second.std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    given = first.preprocess(raw)
    _, model = compare([first, second], given, timed_rounds=0).models
    wanted = diagnose(second, second.preprocess(raw))
    assert torch.allclose(model.diagnosis.norms, wanted.norms, atol=1e-4)
    assert np.abs(model.diagnosis.arrays["thumbnails"].astype(int) - wanted.arrays["thumbnails"]).max() <= 1


def test_unlike_sizes_are_said() -> None:
    photos = list(np.random.default_rng(0).integers(0, 255, (2, 90, 90, 3), dtype=np.uint8))
    found = compare([tiny_vit(), tiny_vit(patch_size=16)], photos, timed_rounds=0)
    assert found.notes == (
        "The models did not see the same pixels, their image sizes differ: tiny: 84 x 84 px; tiny: 96 x 96 px.",
    )
    assert found.models[1].reason == ""  # 6 x 6 cells in both


def test_registers_are_counted_and_their_use_is_measured(pixels: Tensor) -> None:
    backbone = tiny_vit(num_register_tokens=3)
    without, with_registers = compare([tiny_vit(), backbone], iter(list(pixels.unbind())), timed_rounds=0).models
    assert (without.num_register_tokens, without.effective_registers) == (0, None)
    assert with_registers.num_register_tokens == 3
    used = backbone(backbone.preprocess(pixels)).registers.detach().double()
    numbers = []
    for tokens in used:
        unit = (tokens / tokens.norm(dim=-1, keepdim=True)).numpy()
        share = np.linalg.svd(unit, compute_uv=False) ** 2
        share /= share.sum()
        numbers.append(np.exp(-(share * np.log(share)).sum()))
    assert with_registers.effective_registers == pytest.approx(np.mean(numbers), abs=1e-3)


def test_progress_counts_every_pass(pixels: Tensor) -> None:
    done: list[int] = []
    config = DiagnosisConfig(batch_size=2, attention=False)
    found = compare([tiny_vit(), tiny_vit()], pixels, config=config, timed_rounds=0, progress=done.append)
    assert done == [2, 4, 6, 8, 10, 12]
    assert [model.sink_mass for model in found.models] == [None, None]


def test_speed_is_measured_on_request(pixels: Tensor) -> None:
    found = compare([tiny_vit(), tiny_vit(num_register_tokens=1)], pixels, timed_rounds=1)
    first, second = (model.throughput for model in found.models)
    assert first is not None
    assert second is not None
    assert (first.cost, first.batch_size) == (1.0, 4)
    assert f"{second.cost:.2f}x the cost" in found.models[1].sentence


def test_record(found: Comparison, tmp_path: Path) -> None:
    path = found.save(tmp_path / "run")
    run = RunFolder.open(path)
    assert run.record.kind == "comparison"
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["reference"] == "tiny-planted"
    for entry, model in zip(run.record.models, said["models"], strict=True):
        assert {key: entry[key] for key in model} == model
        assert set(run.read_arrays(entry["arrays"])) >= {"norm_maps", "pca_maps", "thumbnails"}
    assert [entry["comparison"]["reference"] for entry in said["models"]] == [True, False, False, False]
    with pytest.raises(ValueError, match="--force"):
        found.save(tmp_path / "run")


def test_mistakes(pixels: Tensor) -> None:
    for few in ("tiny", ["tiny"], tiny_vit()):
        with pytest.raises(ValueError, match=r"two models or more"):
            compare(few, pixels)  # type: ignore[arg-type]
