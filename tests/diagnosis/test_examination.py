from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regista.backbones.tiny import tiny_vit
from regista.data.annotations import read_targets
from regista.diagnosis import Diagnosis, diagnose
from regista.diagnosis.config import DiagnosisConfig
from regista.results import RunFolder


def _images(count: int, size: tuple[int, int] = (112, 98)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def _spikes(cells: list[int], factor: float = 20.0):  # type: ignore[no-untyped-def]
    """An edit that multiplies fixed patch tokens (counted after one CLS)."""

    def edit(tokens: Tensor) -> Tensor:
        scale = torch.ones(tokens.shape[1], 1)
        scale[[1 + cell for cell in cells]] = factor
        return tokens * scale

    return edit


def test_random_model_is_clean() -> None:
    result = diagnose(tiny_vit(), _images(6))
    assert (result.verdict, result.kinds, result.onset_block, result.cutoff) == ("clean", (), None, None)
    assert result.norms.shape == (6, 4, 8, 7)
    assert not result.outliers.any()


def test_spikes_are_found_where_and_from_when_they_are() -> None:
    backbone = tiny_vit()
    cells = [3, 20, 41]
    with backbone.editing({"blocks.2.resid": _spikes(cells)}):
        result = diagnose(backbone, _images(5), batch_size=2)
    assert result.verdict == "artifacts"
    assert "high-norm" in result.kinds
    assert result.onset_block == 2
    assert result.fixed_place == "fixed"
    flat = result.outliers.flatten(1)
    assert flat.sum() == 15
    assert flat[:, cells].all()
    assert result.share == pytest.approx(3 / 56)
    # Before the final norm the spike is large; behind it all norms are about the same.
    tokens = torch.linalg.vector_norm(backbone(_images(5)).patches, dim=-1)
    assert (tokens.max() / tokens.median()) < 1.5
    assert result.measures["high_norm"]["ratio"] > 5


def test_batches_do_not_matter() -> None:
    backbone = tiny_vit(num_register_tokens=4)
    images = _images(6)
    config = DiagnosisConfig(batch_size=6, consistency=True)
    whole = diagnose(backbone, images, config=config)
    single = diagnose(backbone, images, config=DiagnosisConfig(batch_size=1, consistency=True))
    assert torch.allclose(whole.norms, single.norms, atol=1e-5)
    assert whole.arrays.keys() == single.arrays.keys()
    for name in whole.arrays.keys() - {"thumbnails", "histogram_counts", "histogram_edges"}:
        np.testing.assert_allclose(whole.arrays[name], single.arrays[name], atol=2e-4, err_msg=name)
    assert whole.measures["positional"] == pytest.approx(single.measures["positional"], abs=1e-4)


@pytest.mark.parametrize(("registers", "class_token"), [(0, True), (4, True), (4, False), (0, False)])
def test_layouts_and_what_attention_is_shown(registers: int, class_token: bool) -> None:
    result = diagnose(tiny_vit(num_register_tokens=registers, class_token=class_token), _images(2))
    names = [f"register {index}" for index in range(registers)]
    assert result.attention_queries == (["CLS"] if class_token else ["mean over queries"]) + names
    assert result.arrays["attention_maps"].shape == (2, len(result.attention_queries), 8, 7)
    measured = result.measures["registers"]
    assert (measured is None) == (registers == 0)
    if measured:
        assert 1 <= measured["effective_number"] <= registers
        assert len(measured["norms"]) == registers


def test_a_model_with_registers_is_measured_not_assumed_clean() -> None:
    backbone = tiny_vit(num_register_tokens=4)
    with backbone.editing({"blocks.1.resid": _spikes([10, 30])}):  # behind CLS and 4 registers: patches 6 and 26
        result = diagnose(backbone, _images(4))
    assert result.verdict == "artifacts"


def test_nan_weights_name_the_tensor_and_activations_block_and_image() -> None:
    backbone = tiny_vit()

    def poison(tokens: Tensor) -> Tensor:
        tokens = tokens.clone()
        tokens[1, 5] = float("nan")
        return tokens

    with backbone.editing({"blocks.1.resid": poison}), pytest.raises(ValueError, match=r"blocks\.1.*image 1"):
        diagnose(backbone, _images(3))


def test_many_images_go_to_disk() -> None:
    backbone = tiny_vit(embed_dim=16, depth=2, num_heads=2)
    images = _images(300, (28, 42))
    result = diagnose(backbone, images, batch_size=50)
    few = diagnose(backbone, images[:20], batch_size=50)
    assert result.norms.shape == (300, 2, 2, 3)
    assert result.keep_alive is not None
    assert torch.allclose(result.norms[:20], few.norms, atol=1e-5)


def _photos(folder: Path, count: int = 3) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = []
    for index in range(count):
        paths.append(folder / f"photo{index}.png")
        Image.fromarray(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(paths[-1])
    return paths


def test_files_are_read_named_and_skipped(tmp_path: Path) -> None:
    _photos(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"not an image")
    result = diagnose(tiny_vit(), [tmp_path], batch_size=2)
    assert result.images["count"] == 3
    assert [Path(name).stem for name in result.images["names"]] == ["photo0", "photo1", "photo2"]
    assert "broken.png" in result.images["skipped"][0][0]
    assert "112x112" in result.images["note"]


def test_padding_is_never_an_outlier(tmp_path: Path) -> None:
    paths = _photos(tmp_path)
    backbone = tiny_vit()
    with backbone.editing({"blocks.3.resid": _spikes(list(range(56, 64)))}):  # the last of 8 rows: padding
        result = diagnose(backbone, paths, config=DiagnosisConfig(image_size=[112, 112], policy="pad"))
    assert result.verdict == "clean"


def test_boxes_give_a_hit_ratio_beside_its_chance(tmp_path: Path) -> None:
    paths = _photos(tmp_path)
    rows = ["image,xmin,ymin,xmax,ymax", *(f"{path.name},0,0,80,60" for path in paths[:2])]
    (tmp_path / "boxes.csv").write_text("\n".join(rows))
    result = diagnose(tiny_vit(), paths, targets=read_targets(boxes=tmp_path / "boxes.csv"))
    assert result.measures["lazy"] == {"found": False, "hit_ratio": 1.0, "chance": 1.0, "deviation": 0.0, "images": 2}


def test_a_given_cutoff_is_used() -> None:
    backbone = tiny_vit()
    with backbone.editing({"blocks.2.resid": _spikes([3])}):
        result = diagnose(backbone, _images(4), cutoff=1e6)
    assert result.verdict == "clean"


def test_record_is_plain_json_and_saved(tmp_path: Path) -> None:
    backbone = tiny_vit()
    with backbone.editing({"blocks.2.resid": _spikes([3, 20])}):
        result = diagnose(backbone, _images(3))
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["outlier_positions"] == [[[0, 3], [2, 6]]] * 3
    folder = result.save(tmp_path / "run")
    run = RunFolder.open(folder)
    (saved,) = run.record.models
    assert saved["verdict"] == "artifacts"
    assert run.read_arrays(saved["arrays"])["outlier_masks"].sum() == 6
    with pytest.raises(ValueError, match="--force"):
        result.save(folder)
    assert isinstance(result, Diagnosis)


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "squash"}, {"batch_size": 0}, {"image_size": [3]}, {"cutoff": -1.0}],
)
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DiagnosisConfig(**wrong)  # type: ignore[arg-type]


def test_images_of_unlike_form_are_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        diagnose(tiny_vit(), [])
    with pytest.raises(ValueError, match=r"\(n, 3, H, W\)"):
        diagnose(tiny_vit(), torch.zeros(3, 112, 112))


def test_images_that_are_alike_say_nothing_about_position() -> None:
    one = _images(1)
    noise = 0.05 * torch.randn(5, *one.shape[1:], generator=torch.Generator().manual_seed(1))
    for alike in (one.expand(4, -1, -1, -1), one + noise, torch.ones(3, 3, 56, 56)):
        result = diagnose(tiny_vit(), alike)
        assert "positional" not in result.kinds
        measured = result.measures["positional"]
        assert measured is None or not measured["judged"]


def test_features_fixed_by_position_are_found() -> None:
    backbone = tiny_vit()
    place = 50 * torch.randn(57, 64, generator=torch.Generator().manual_seed(2))
    with backbone.editing({"blocks.3.resid": lambda tokens: tokens + place}):
        result = diagnose(backbone, _images(6))
    assert "positional" in result.kinds
    assert result.measures["positional"]["judged"]


@pytest.mark.parametrize(("block", "kinds"), [(0, ()), (3, ("attention-sink",))])
def test_sinks_count_in_the_later_half_of_the_blocks(block: int, kinds: tuple[str, ...]) -> None:
    backbone = tiny_vit()

    def pull(keys: Tensor) -> Tensor:  # every query meets the keys of these two tokens
        keys = keys.clone()
        keys[:, :, [6, 31]] = 0
        keys[:, :, [6, 31], 0] = 40
        return keys

    def ask(queries: Tensor) -> Tensor:
        queries = queries.clone()
        queries[..., 0] = 0.8
        return queries

    with backbone.editing({f"blocks.{block}.k": pull, f"blocks.{block}.q": ask}):
        result = diagnose(backbone, _images(6))
    assert result.kinds == kinds
    assert result.measures["attention_sink"]["mass_by_block"][block] > 0.05


def test_what_load_takes_diagnose_takes() -> None:
    by_name = diagnose("tiny", _images(2))
    by_module = diagnose(tiny_vit().module, _images(2))
    assert torch.equal(by_name.norms, by_module.norms)


@pytest.mark.parametrize("wrong", [None, 5, torch.rand(2, 112, 112, 3), 255 * torch.rand(2, 3, 112, 112)])
def test_wrong_images_are_one_error(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"images|tensor"):
        diagnose(tiny_vit(), wrong)


def test_an_infinite_cutoff_is_refused() -> None:
    with pytest.raises(ValueError, match="cutoff"):
        diagnose(tiny_vit(), _images(2), cutoff=float("inf"))
