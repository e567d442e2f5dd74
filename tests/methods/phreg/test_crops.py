"""Crops of image and target match cell by cell and depend on nothing but seed, epoch and image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regista.methods.phreg import CropDataset, TargetStore, compute_targets
from regista.methods.phreg.crops import Crop
from regista.train.config import TrainConfig
from regista.train.sampling import Batches, Plan
from tests.methods.phreg.conftest import photo
from tests.methods.phreg.stubs import StubBackbone, patch_statistics
from tests.tolerances import assert_close

SIDE, PATCH = 32, 4


@pytest.fixture
def store(photos: list[Path], tmp_path: Path) -> TargetStore:
    """Targets that move with the image: the features of a crop are those of its cells."""
    return compute_targets(StubBackbone(patch_statistics), photos, tmp_path / "targets", dtype="float32")


@pytest.mark.parametrize("flip", [False, True])
def test_image_and_target_match(store: TargetStore, flip: bool) -> None:
    data = CropDataset(store, flip=flip)
    seen = set()
    for epoch in range(12):
        for item in range(len(data)):
            pixels, target = data.item(item, epoch=epoch, seed=0)
            assert pixels.shape == (3, SIDE, SIDE)
            assert target.shape == ((SIDE // PATCH) ** 2, 6)
            assert target.dtype == torch.float32
            assert_close(target, patch_statistics(pixels.unsqueeze(0), (8, 8)).squeeze(0))
            seen.add((item, data.crop(item, epoch=epoch)))
    places = {item: {crop for number, crop in seen if number == item} for item in range(5)}
    assert {crop.row for crop in places[0]} == {0}
    assert {crop.col for crop in places[0]} == {0, 1, 2, 3, 4}  # a map of 8 x 12 cells
    assert {crop.row for crop in places[1]} == {0, 1, 2}  # of 10 x 8
    assert {(crop.row, crop.col) for crop in places[2]} == {(0, 0)}  # a square
    assert {crop.flip for _, crop in seen} == ({False, True} if flip else {False})


def test_a_crop_is_a_piece_of_the_map(store: TargetStore) -> None:
    """Half precision or not, cell by cell, with a flip by hand."""
    data = CropDataset(store, flip=True)
    for epoch in range(6):
        for item in range(len(data)):
            crop = data.crop(item, epoch=epoch, seed=2)
            whole = store.read(item)
            _, cols = store.grid_size(item)
            _, target = data.item(item, epoch=epoch, seed=2)
            for row in range(8):
                for col in range(8):
                    source = crop.col + (7 - col if crop.flip else col)
                    assert torch.equal(target[row * 8 + col], whole[(crop.row + row) * cols + source])


def test_deterministic(store: TargetStore) -> None:
    def crops(seed: int, epoch: int) -> list[object]:
        data = CropDataset(store.folder, flip=True)
        torch.manual_seed(epoch)
        return [data.crop(item, epoch=epoch, seed=seed) for item in reversed(range(5))]

    assert crops(0, 3) == crops(0, 3)
    assert len({str(crops(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_workers_give_the_same(store: TargetStore) -> None:
    data = CropDataset(store, flip=True)
    settings = [TrainConfig(batch_size=2, num_workers=workers, seed=3) for workers in (0, 2)]
    for epoch in range(2):
        alone, shared = (
            [part for parts in Batches(data, Plan(len(data), config)).epoch(epoch, 0) for part, _ in parts]
            for config in settings
        )
        for (pixels, targets), (others, same) in zip(alone, shared, strict=True):
            assert torch.equal(pixels, others)
            assert torch.equal(targets, same)


def test_central_crops_stay(store: TargetStore) -> None:
    data = CropDataset(store, central=True, flip=True)
    assert [data.crop(item, epoch=epoch) for item in range(3) for epoch in (0, 5)] == [
        Crop(0, 2, False), Crop(0, 2, False), Crop(1, 0, False), Crop(1, 0, False), Crop(0, 0, False), Crop(0, 0, False)
    ]  # fmt: skip


def test_some_images(store: TargetStore) -> None:
    data = CropDataset(store, indices=[4, 1])
    assert torch.equal(data[0][1], CropDataset(store)[4][1])
    assert len(data) == 2
    with pytest.raises(ValueError, match="no target of the images"):
        CropDataset(store, indices=[77])


def test_skipped_images_leave_no_hole(photos: list[Path], tmp_path: Path) -> None:
    photos[1].write_text("no image")
    store = compute_targets(StubBackbone(patch_statistics), photos, tmp_path / "t", dtype="float32")
    data = CropDataset(store)
    assert len(data) == 4
    for item in range(4):
        pixels, target = data[item]
        assert_close(target, patch_statistics(pixels.unsqueeze(0), (8, 8)).squeeze(0))


def test_missing_targets(store: TargetStore) -> None:
    (shard,) = store.folder.glob("shard-*")
    shard.unlink()
    some = TargetStore.open(store.folder)
    with pytest.raises(ValueError, match="0 targets, 5 are missing"):
        CropDataset(some, allow_partial=True)
    some.write(3, store.settings.embed_dim * torch.ones(8 * 16, 6))
    some.flush()
    with pytest.raises(ValueError, match=r"1 targets, 4 are missing; .*resume=True"):
        CropDataset(store.folder)
    assert len(CropDataset(store.folder, allow_partial=True)) == 1
    with pytest.raises(ValueError, match="holds no targets"):
        CropDataset(store.folder / "elsewhere")


def test_a_file_that_changed_or_went_is_named(store: TargetStore, photos: list[Path]) -> None:
    data = CropDataset(store)
    photo(photos[2], (50, 50), 99)
    photos[3].unlink()
    with pytest.raises(ValueError, match=r"2\.png has changed since its target was made"):
        data[2]
    with pytest.raises(ValueError, match=r"3\.png: no such file"):
        data[3]
    assert len(data[0]) == 2
