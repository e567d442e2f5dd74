"""Targets of files: against denoising by hand, killed and resumed, full disks and broken images."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import regista
from regista.backbones.base import Backbone
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg import TargetStore, compute_targets, denoise
from regista.methods.phreg.computing import image_views
from regista.methods.phreg.map_images import MapGeometry, describe_images
from tests.methods.phreg.conftest import SIZES, photo
from tests.methods.phreg.stubs import StubBackbone, patch_statistics, position_dependent
from tests.tolerances import assert_close

Usage = namedtuple("Usage", "total used free")
MAPS = [(32, 48), (40, 32), (32, 32), (32, 64), (32, 44)]  # of SIZES, R = 32, patch 4, at most 2 R


def stub() -> StubBackbone:
    return StubBackbone(position_dependent, num_register_tokens=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", SIZES)
def test_maps_keep_the_aspect(size: tuple[int, int]) -> None:
    geometry = MapGeometry(32, 4, 2.0, (0.5,) * 3, (0.5,) * 3)
    height, width = geometry.map_size(size)
    assert (height, width) == MAPS[SIZES.index(size)]
    assert geometry.map_size(size[::-1]) == (width, height)
    image = Image.new("RGB", size[::-1])
    for x in range(0, size[1], 2):  # stripes of two pixels: their number in the map says the scale
        image.paste((255, 255, 255) if x % 4 else (0, 0, 0), (x, 0, x + 2, size[0]))
    fitted = geometry.fit([image])
    assert fitted.pixels.shape == (1, 3, height, width)
    scale = 32 / min(size)
    (place,) = fitted.placements
    assert place.scale == pytest.approx((scale, scale), rel=0.02)
    assert place.offset[0] <= 0
    assert place.offset[1] <= 0


@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_targets_equal_denoising_by_hand(photos: list[Path], tmp_path: Path, batch_size: int, workers: int) -> None:
    done: list[int] = []
    store = compute_targets(
        stub(), photos, tmp_path / "t", seed=3, batch_size=batch_size, num_workers=workers, progress=done.append
    )
    assert done == [1, 2, 3, 4, 5, 5]
    assert store.missing() == []
    store = TargetStore.open(tmp_path / "t")
    white = 0
    for index, path in enumerate(photos):
        rows, cols = store.grid_size(index)
        assert (rows * 4, cols * 4) == MAPS[index]
        pixels = store.settings.geometry.fit([Image.open(path)]).pixels
        views = image_views(3, index, (rows, cols), 10, 0.15)
        wanted = denoise(stub(), pixels, views=views).squeeze(0)
        assert_close(store.read(index), wanted, dtype=torch.float16)
        white += int((store.read(index) - stub()(pixels).patches).abs().max() > 0.1)
    assert white == 5


def test_views_depend_on_seed_and_index_alone() -> None:
    drawn = {str(image_views(seed, index, (37, 37), 10, 0.15)) for seed in range(3) for index in range(3)}
    assert len(drawn) == 9
    torch.manual_seed(9)
    assert str(image_views(1, 2, (37, 37), 10, 0.15)) in drawn


def test_a_real_vit_with_registers(photos: list[Path], tmp_path: Path) -> None:
    backbone = tiny_vit(num_register_tokens=4)
    store = compute_targets(backbone, photos[:2], tmp_path / "t", image_size=56, num_views=3)
    assert store.read(0).shape == (4 * 6, 64)
    assert store.settings.embed_dim == 64
    again = compute_targets(tiny_vit(num_register_tokens=4), photos[:2], tmp_path / "u", image_size=56, num_views=3)
    assert contents(store.folder) == contents(again.folder)


KILLED = """
import os, signal, sys
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg import compute_targets, targets
save, saved = targets.save_file, []
def save_file(tensors, path, metadata):
    save(tensors, path, metadata=metadata)
    saved.append(path)
    if len(saved) == 2:
        with open(path, "r+b") as file:
            file.truncate(300)
        os.kill(os.getpid(), signal.SIGKILL)
targets.save_file = save_file
compute_targets(tiny_vit(), sys.argv[1], sys.argv[2], image_size=28, num_views=2, shard_size=2)
"""


def test_killed_and_resumed(photos: list[Path], tmp_path: Path) -> None:
    def compute(folder: str, **options: Any) -> TargetStore:
        images = photos[0].parent
        return compute_targets(
            tiny_vit(), images, tmp_path / folder, image_size=28, num_views=2, shard_size=2, **options
        )

    whole = compute("whole")
    command = [sys.executable, "-c", KILLED, str(photos[0].parent), str(tmp_path / "killed")]
    died = subprocess.run(command, check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left.pop(0).endswith(".partial")
    assert left == ["index.json", "shard-000000.safetensors"]
    assert TargetStore.open(tmp_path / "killed").missing() == [2, 3, 4]
    with pytest.raises(ValueError, match="resume=True goes on"):
        compute("killed")
    shard = tmp_path / "killed" / "shard-000000.safetensors"
    before = shard.stat()
    done: list[int] = []
    resumed = compute("killed", resume=True, progress=done.append)
    assert done == [3, 4, 5, 5]
    assert shard.stat() == before
    assert contents(resumed.folder) == contents(whole.folder)


def test_killed_before_the_first_shard(photos: list[Path], tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_targets(stub(), photos, tmp_path / "t", progress=stop)
    assert TargetStore.open(tmp_path / "t").indices() == [0]  # an interrupt, unlike a kill, loses nothing
    (tmp_path / "t" / "shard-000000.safetensors").unlink()
    assert len(compute_targets(stub(), photos, tmp_path / "t", resume=True)) == 5
    assert len(compute_targets(stub(), photos, tmp_path / "new", resume=True)) == 5


def test_resuming_a_finished_store_reads_no_image(
    photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_targets(stub(), photos, tmp_path / "t")
    before = contents(tmp_path / "t")
    monkeypatch.setattr("regista.data.images.load_image", lambda path: pytest.fail(f"{path} was read"))
    compute_targets(stub(), photos, tmp_path / "t", resume=True)
    assert contents(tmp_path / "t") == before


def test_other_models_settings_and_images_are_refused(photos: list[Path], tmp_path: Path) -> None:
    backbone = stub()
    compute_targets(backbone, photos, tmp_path / "t")
    with pytest.raises(ValueError, match="num_views 10, now it is 4"):
        compute_targets(backbone, photos, tmp_path / "t", resume=True, num_views=4)
    with pytest.raises(ValueError, match="image_size 32, now it is 16"):
        compute_targets(backbone, photos, tmp_path / "t", resume=True, image_size=16)
    with pytest.raises(ValueError, match="5 images, now there are 4"):
        compute_targets(backbone, photos[:4], tmp_path / "t", resume=True)
    with pytest.raises(ValueError, match=r"image 0 .*0\.png.*1\.png"):
        compute_targets(backbone, [photos[1], photos[0], *photos[2:]], tmp_path / "t", resume=True)
    photo(photos[2], SIZES[2], 77)
    with pytest.raises(ValueError, match=r"image 2 .*2\.png"):
        compute_targets(backbone, photos, tmp_path / "t", resume=True)
    with torch.no_grad():
        next(backbone.module.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"weights [0-9a-f]{64}, now it is [0-9a-f]{64} \(of stub and stub\)"):
        compute_targets(backbone, photos, tmp_path / "t", resume=True)


def test_unreadable_images_are_skipped_and_named(photos: list[Path], tmp_path: Path) -> None:
    photos[3] = photo(photos[3].with_suffix(".jpg"), SIZES[3], 3)
    whole = compute_targets(stub(), photos, tmp_path / "whole")
    photos[1].write_text("no image")
    photos[3].write_bytes(photos[3].read_bytes()[:-200])  # its header is fine
    described = describe_images(photos, whole.settings.geometry)
    assert [bool(entry.reason) for entry in described] == [False, True, False, False, False]
    store = compute_targets(stub(), photos, tmp_path / "t")
    assert [path for path, _ in store.skipped] == [photos[1], photos[3]]
    assert all(reason for _, reason in store.skipped)
    again = TargetStore.open(tmp_path / "t")
    assert again.indices() == [0, 2, 4]
    assert again.missing() == []
    assert again.skipped == store.skipped
    assert all(torch.equal(again.read(index), whole.read(index)) for index in (0, 2, 4))
    assert len(compute_targets(stub(), photos, tmp_path / "t", resume=True)) == 3


def test_the_last_missing_images_may_all_be_unreadable(photos: list[Path], tmp_path: Path) -> None:
    photos[4] = photo(photos[4].with_suffix(".jpg"), SIZES[4], 4)
    photos[4].write_bytes(photos[4].read_bytes()[:-200])

    def stop(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_targets(stub(), photos, tmp_path / "t", progress=stop, num_workers=0)
    assert TargetStore.open(tmp_path / "t").missing() == [4]
    store = compute_targets(stub(), photos, tmp_path / "t", resume=True)
    assert [path for path, _ in store.skipped] == [photos[4]]
    assert len(store) == 4


@pytest.mark.parametrize("spoil", [lambda content: b"no image", lambda content: content[:-200], lambda content: b""])
def test_none_left(photos: list[Path], tmp_path: Path, spoil: Any) -> None:
    for path in photos:
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=r"none of 5 image\(s\) could be read: .*0\.png"):
        compute_targets(stub(), photos, tmp_path / "t")


def test_a_header_that_lies_is_skipped(photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regista.methods.phreg.map_images._upright_size", lambda path: (20, 20))
    store = compute_targets(stub(), photos, tmp_path / "t")
    assert store.indices() == [2]  # the square one
    assert {reason for _, reason in store.skipped} == {"its header gives another size than its pixels"}


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_counts(tmp_path: Path, suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{suffix}"
    Image.new("RGB", (60, 40)).save(path, exif=exif)
    geometry = MapGeometry(32, 4, 2.0, (0.5,) * 3, (0.5,) * 3)
    (entry,) = describe_images([path], geometry)
    assert entry.map_size == ((48, 32) if orientation in (6, 8) else (32, 48))
    assert entry.bytes == path.stat().st_size


def test_a_full_disk_stops_it_before_it_begins(
    photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    backbone = stub()
    with pytest.raises(ValueError, match=r"targets need .* MiB, .* MiB are free"):
        compute_targets(backbone, photos, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert len(backbone.seen) == 1  # the blank image that tells D


def test_the_disk_cost_is_said_before_anything_is_computed(
    photos: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="regista"):
        store = compute_targets(tiny_vit(image_size=(56, 56)), photos, tmp_path / "targets", num_views=2)
    (line,) = (record.getMessage() for record in caplog.records if "on the disk" in record.getMessage())
    assert str(tmp_path / "targets") in line
    used = sum(file.stat().st_size for file in (tmp_path / "targets").glob("shard-*"))
    stated = float(line.split(": ")[1].split(" MiB")[0]) * 2**20
    assert used <= stated * 1.01
    assert len(store) == len(photos)
    caplog.clear()
    with caplog.at_level("INFO", logger="regista"):
        compute_targets(tiny_vit(image_size=(56, 56)), photos, tmp_path / "targets", num_views=2, resume=True)
    assert not caplog.records


def test_another_read_out_needs_a_name(photos: list[Path], tmp_path: Path) -> None:
    def halves(backbone: Backbone, images: torch.Tensor) -> torch.Tensor:
        return backbone(images).patches.narrow(2, 0, 3)

    with pytest.raises(ValueError, match="name of its own"):
        compute_targets(stub(), photos, tmp_path / "t", features=halves)
    store = compute_targets(stub(), photos, tmp_path / "t", features=halves, readout="halves")
    plain = compute_targets(stub(), photos, tmp_path / "plain")
    assert store.settings.embed_dim == 3
    assert torch.equal(store.read(0), plain.read(0).narrow(1, 0, 3))
    with pytest.raises(ValueError, match="readout halves, now it is patches"):
        compute_targets(stub(), photos, tmp_path / "t", resume=True)


@pytest.mark.parametrize(("options", "message"), [
    ({"image_size": 30}, "not divisible by the patch size 4"),
    ({"num_views": 0}, "num_views"),
    ({"shift_ratio": 1.5}, "shift_ratio"),
    ({"seed": -1}, "seed"),
    ({"batch_size": 0}, "batch_size"),
    ({"dtype": "int8"}, "float16 or float32"),
    ({"max_aspect": 0.5}, "max_aspect"),
    ({"shard_size": 0}, "shard_size"),
])  # fmt: skip
def test_settings_are_checked(photos: list[Path], tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_targets(stub(), photos, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_backbone_of_oblong_images_needs_a_side(photos: list[Path], tmp_path: Path) -> None:
    backbone = StubBackbone(patch_statistics, image_size=(32, 48))
    with pytest.raises(ValueError, match="32x48 pixels; say image_size"):
        compute_targets(backbone, photos, tmp_path / "t")
    assert len(compute_targets(backbone, photos, tmp_path / "t", image_size=32)) == 5


def test_features_that_overflow_half_precision(photos: list[Path], tmp_path: Path) -> None:
    loud = StubBackbone(lambda images, grid: 1e6 * patch_statistics(images, grid))
    with pytest.raises(ValueError, match=r"0\.png: a feature of size .* float16; store targets as dtype='float32'"):
        compute_targets(loud, photos, tmp_path / "t")
    assert len(compute_targets(loud, photos, tmp_path / "u", dtype="float32")) == 5


def test_by_name() -> None:
    assert regista.methods.phreg.compute_targets is compute_targets
