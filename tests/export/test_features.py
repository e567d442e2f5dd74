from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from regista.backbones.tiny import tiny_vit
from regista.export.features import extract_features, file_batches, write_features


def _batches(count: int) -> list[torch.Tensor]:
    images = torch.randn(count, 3, 56, 70, generator=torch.Generator().manual_seed(0))
    return list(images.split(2))


def test_features_are_those_of_the_backbone() -> None:
    backbone = tiny_vit(num_register_tokens=4)
    features = extract_features(backbone, _batches(3))
    with torch.inference_mode():
        whole = backbone(torch.cat(_batches(3)))
    assert {kind: value.shape for kind, value in features.items()} == {
        "cls": (3, 64),
        "registers": (3, 4, 64),
        "patches": (3, 20, 64),
        "pooled": (3, 64),
    }
    np.testing.assert_allclose(features["patches"], whole.patches.numpy(), atol=1e-5)
    np.testing.assert_array_equal(features["pooled"], features["cls"])


def test_a_block_is_read_before_any_norm_and_missing_kinds_are_left_out() -> None:
    backbone = tiny_vit(class_token=False)
    features = extract_features(backbone, _batches(2), block=1)
    with torch.inference_mode():
        wanted = backbone(_batches(2)[0], capture=["blocks.1.resid"]).captured["blocks.1.resid"]
    assert list(features) == ["patches"]
    np.testing.assert_allclose(features["patches"], wanted.numpy(), atol=1e-6)


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="block 9"):
        extract_features(tiny_vit(), _batches(1), block=9)
    with pytest.raises(ValueError, match="colour"):
        extract_features(tiny_vit(), _batches(1), kinds=["colour"])
    with pytest.raises(ValueError, match="no image"):
        extract_features(tiny_vit(), [])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_every_format_gives_back_names_and_values(tmp_path: Path, suffix: str) -> None:
    features = extract_features(tiny_vit(num_register_tokens=1), _batches(3))
    names = ["a/é.png", "b.png", "c.png"]
    path = tmp_path / "deep" / f"features{suffix}"
    write_features(path, names, features)
    assert list(path.parent.iterdir()) == [path]
    for kind, value in features.items():
        read_names, read = _read(path, kind)
        assert read_names == names
        np.testing.assert_array_equal(read, value)


def _read(path: Path, kind: str) -> tuple[list[str], np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return file["names"].tolist(), file[kind]
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return json.loads(file.metadata()["names"]), file.get_tensor(kind)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    shape = [int(size) for size in table.schema.metadata[f"shape.{kind}".encode()].decode().split("x")]
    return table["name"].to_pylist(), np.array(table[kind].to_pylist(), dtype=np.float32).reshape(-1, *shape)


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.csv"):
        write_features(tmp_path / "features.csv", [], {})


def test_files_stream_in_order_and_bad_ones_are_named(tmp_path: Path) -> None:
    for name in "abc":
        Image.new("RGB", (80, 60), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    (tmp_path / "bad.png").write_bytes(b"")
    batches = file_batches(tiny_vit(), sorted(tmp_path.iterdir()), batch_size=2, image_size=(28, 42))
    features = extract_features(tiny_vit(), batches)
    assert features["patches"].shape == (3, 6, 64)
    assert [Path(name).stem for name in batches.names] == ["a", "b", "c"]
    assert [path.name for path, _ in batches.skipped] == ["bad.png"]
    assert "28x42" in batches.note
