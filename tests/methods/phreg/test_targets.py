"""The store alone: what is written is what is read, damage and mistakes are named."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regista.methods.phreg.map_images import ImageEntry, MapGeometry
from regista.methods.phreg.target_settings import TargetSettings
from regista.methods.phreg.targets import TargetStore, check_space, disk_cost

DIM = 5
GEOMETRY = MapGeometry(16, 4, 2.0, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
SETTINGS = TargetSettings("teacher", "abc", "patches", DIM, GEOMETRY, 10, 0.15, 7)
Usage = namedtuple("Usage", "total used free")


def entries(count: int = 7) -> list[ImageEntry]:
    return [ImageEntry(f"{index}.png", 100 + index, f"{index:064x}", (16, 16 + 4 * index)) for index in range(count)]


def target(index: int, seed: int = 0) -> Tensor:
    return torch.randn(4 * (4 + index), DIM, generator=torch.Generator().manual_seed(100 * seed + index))


def filled(folder: Path, written: range | list[int], shard_size: int = 2, **changes: Any) -> TargetStore:
    store = TargetStore.create(folder, replace(SETTINGS, **changes), entries(), shard_size=shard_size)
    for index in written:
        store.write(index, target(index))
    store.flush()
    return store


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    filled(tmp_path / "deep" / "store", [5, 0, 3, 1, 6], dtype=dtype)
    store = TargetStore.open(tmp_path / "deep" / "store")
    assert store.settings == replace(SETTINGS, dtype=dtype)
    assert store.images == entries()
    assert store.indices() == [0, 1, 3, 5, 6]
    assert store.missing() == [2, 4]
    assert len(store) == 5
    for index in store.indices():
        found = store.read(index)
        assert found.dtype == torch.float32
        assert store.grid_size(index) == (4, 4 + index)
        assert torch.equal(found, target(index).to(getattr(torch, dtype)).float())
    with pytest.raises(ValueError, match=r"image 2 \(2\.png\) has no target"):
        store.read(2)


def test_shards_fill_and_what_waits_can_be_read(tmp_path: Path) -> None:
    store = TargetStore.create(tmp_path, SETTINGS, entries(), shard_size=3)
    written = target(0)
    for index in range(5):
        store.write(index, written if index == 0 else target(index))
    written.zero_()  # a copy is kept
    assert len(list(tmp_path.glob("shard-*"))) == 1
    assert store.indices() == [0, 1, 2, 3, 4]
    assert torch.equal(store.read(4), target(4).half().float())
    assert torch.equal(store.read(0), target(0).half().float())
    assert TargetStore.open(tmp_path).indices() == [0, 1, 2]  # as after a kill
    store.flush()
    store.flush()
    assert len(list(tmp_path.glob("shard-*"))) == 2
    assert TargetStore.open(tmp_path).indices() == [0, 1, 2, 3, 4]


def test_going_on_writes_new_shards(tmp_path: Path) -> None:
    filled(tmp_path, [0, 1, 2])
    store = TargetStore.open(tmp_path)
    assert store.shard_size == 2
    for index in store.missing():
        store.write(index, target(index))
    store.flush()
    again = TargetStore.open(tmp_path)
    assert again.missing() == []
    assert all(torch.equal(again.read(index), target(index).half().float()) for index in range(7))


def test_the_unreadable_are_not_missing(tmp_path: Path) -> None:
    store = TargetStore.create(tmp_path, SETTINGS, [*entries(2), ImageEntry("bad.png", 3, "00", None, "no image")])
    store.skip(1, "truncated")
    store.flush()
    again = TargetStore.open(tmp_path)
    assert again.missing() == [0]
    assert again.skipped == [(Path("1.png"), "truncated"), (Path("bad.png"), "no image")]
    with pytest.raises(ValueError, match=r"bad\.png.*no map: no image"):
        again.grid_size(2)
    with pytest.raises(ValueError, match="image 3 does not exist"):
        again.read(3)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda target: target[1:], r"1\.png.*\(20, 5\).*4 rows x 5 cols.*\(19, 5\)"),
    (lambda target: target.t(), r"\(5, 20\)"),
    (lambda target: target * float("nan"), "nan does not fit float16"),
    (lambda target: target / 0, "inf does not fit float16"),
    (lambda target: target * 0 + 65505, r"1\.png.*65505 does not fit float16; store targets as dtype='float32'"),
])  # fmt: skip
def test_targets_that_do_not_fit(tmp_path: Path, spoil: Any, message: str) -> None:
    store = TargetStore.create(tmp_path, SETTINGS, entries())
    with pytest.raises(ValueError, match=message):
        store.write(1, spoil(target(1)))
    assert store.indices() == []


def test_large_features_fit_float32_and_the_largest_of_float16(tmp_path: Path) -> None:
    store = filled(tmp_path / "32", [], dtype="float32")
    store.write(1, target(1) * 1e6)
    assert torch.equal(store.read(1), target(1) * 1e6)
    store = filled(tmp_path / "16", [])
    store.write(1, torch.full((20, DIM), -65504.0))
    assert torch.equal(store.read(1), torch.full((20, DIM), -65504.0))


@pytest.mark.parametrize(("change", "message"), [
    ({"weights": "xyz", "model": "other"}, r"weights abc, now it is xyz \(of teacher and other\)"),
    ({"num_views": 5}, "num_views 10, now it is 5"),
    ({"shift_ratio": 0.1}, r"shift_ratio 0\.15, now it is 0\.1"),
    ({"seed": 8}, "seed 7, now it is 8"),
    ({"readout": "naclip"}, "readout patches, now it is naclip"),
    ({"dtype": "float32"}, "dtype float16, now it is float32"),
    ({"embed_dim": 6}, "embed_dim 5, now it is 6"),
    ({"geometry": replace(GEOMETRY, image_size=20)}, "image_size 16, now it is 20"),
    ({"geometry": replace(GEOMETRY, mean=(0.1, 0.5, 0.5))}, "mean"),
])  # fmt: skip
def test_other_settings_are_refused_with_both_values(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    filled(tmp_path, [0])
    with pytest.raises(ValueError, match=message):
        TargetStore.open(tmp_path).check(replace(SETTINGS, **change), entries())


def test_other_images_are_refused_and_moved_ones_are_not(tmp_path: Path) -> None:
    filled(tmp_path, [0])
    store = TargetStore.open(tmp_path)
    store.check(replace(SETTINGS, model="the same under another name"), entries())
    store.check(SETTINGS, [replace(entry, path=f"elsewhere/{entry.path}") for entry in entries()])
    with pytest.raises(ValueError, match="7 images, now there are 6"):
        store.check(SETTINGS, entries(6))
    other = entries()
    other[3] = replace(other[3], sha256="f" * 64, bytes=9)
    with pytest.raises(ValueError, match=r"image 3 .*3\.png \(103 bytes.*now it is 3\.png \(9 bytes, sha256 fff"):
        store.check(SETTINGS, other)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    filled(tmp_path, [0])
    with pytest.raises(ValueError, match="has targets already"):
        TargetStore.create(tmp_path, SETTINGS, entries())
    (tmp_path / "index.json").unlink()
    with pytest.raises(ValueError, match="has targets already"):
        TargetStore.create(tmp_path, SETTINGS, entries())
    with pytest.raises(ValueError, match="holds no targets"):
        TargetStore.open(tmp_path)
    with pytest.raises(ValueError, match="shard_size"):
        TargetStore.create(tmp_path / "new", SETTINGS, entries(), shard_size=0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "settings": {}, "images": []}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    filled(tmp_path, [0])
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is no index of targets, or damaged"):
        TargetStore.open(tmp_path)


def test_an_index_of_another_version_is_named(tmp_path: Path) -> None:
    filled(tmp_path, [0])
    content = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ValueError, match=r"index\.json has version 2"):
        TargetStore.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 60, -1])
def test_a_cut_shard_is_named_when_opened(tmp_path: Path, keep: int) -> None:
    filled(tmp_path, range(4))
    shard = tmp_path / "shard-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"shard-000001\.safetensors is damaged .*delete it and resume"):
        TargetStore.open(tmp_path)
    shard.unlink()
    assert TargetStore.open(tmp_path).missing() == [2, 3, 4, 5, 6]


def test_a_changed_byte_is_named_when_read(tmp_path: Path) -> None:
    filled(tmp_path, range(4))
    shard = tmp_path / "shard-000001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    store = TargetStore.open(tmp_path)
    with pytest.raises(ValueError, match=r"shard-000001\.safetensors is damaged .*what was written"):
        _ = [store.read(index) for index in (2, 3)]
    assert torch.equal(store.read(0), target(0).half().float())


def test_a_full_disk_leaves_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regista.methods.phreg import targets

    store = filled(tmp_path, range(2))

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(targets, "save_file", full)
    store.write(2, target(2))
    with pytest.raises(ValueError, match=r"cannot write .*shard-000001\.safetensors: the disk is full"):
        store.write(3, target(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard-000000.safetensors"]
    monkeypatch.undo()
    store.flush()  # once there is room, nothing is lost
    assert TargetStore.open(tmp_path).indices() == [0, 1, 2, 3]


def test_disk_cost_is_what_is_used(tmp_path: Path) -> None:
    assert disk_cost(1, (37, 37), 768) == pytest.approx(2 * 2**20, rel=0.01)  # 2.0 MiB an image
    assert disk_cost(31_800, (37, 37), 768) / 2**30 == pytest.approx(62, abs=0.7)
    assert disk_cost(3, (4, 5), 6, "float32") - disk_cost(3, (4, 5), 6) == 3 * 4 * 5 * 6 * 2
    images = [replace(entry, map_size=(400, 400)) for entry in entries(5)]
    store = TargetStore.create(tmp_path, SETTINGS, images, shard_size=2)
    for index in range(5):
        store.write(index, torch.randn(10_000, DIM))
    store.flush()
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert used == pytest.approx(disk_cost(5, (100, 100), DIM), rel=0.01)
    assert used <= disk_cost(5, (100, 100), DIM)


def test_too_little_room_is_said_in_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> Usage:
        asked.append(Path(path))
        return Usage(100 * 2**30, 0, 10 * 2**30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_space(tmp_path / "not" / "yet", 9 * 2**30)
    assert asked == [tmp_path]
    with pytest.raises(ValueError, match=r"need 10\.2 GiB, 10 GiB are free"):
        check_space(tmp_path / "not" / "yet", 10 * 2**30)


def test_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    store = filled(tmp_path, [0, 1])
    (tmp_path / ".shard-000001.safetensors.99-abcd.partial").write_bytes(b"half")
    assert TargetStore.open(tmp_path).indices() == [0, 1]
    store.clear_partial()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard-000000.safetensors"]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="float16 or float32, got 'bfloat16'"):
        replace(SETTINGS, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"18 is not divisible by the patch size 4; take 16"):
        replace(GEOMETRY, image_size=18)
    with pytest.raises(ValueError, match="max_aspect"):
        replace(GEOMETRY, max_aspect=0.5)
