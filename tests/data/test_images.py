"""The stream: order, batches, unreadable files, memory, threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regista.data import images as module
from regista.data.images import FittedImages, ImageStream, fit_images

BAD = (2, 3, 7)


def fit(images: list[Image.Image]) -> FittedImages:
    return fit_images(images, size=None, default_size=(28, 42), patch_size=14, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Eleven files, each of its own shade and size; three are broken."""
    found = []
    for index in range(11):
        found.append(tmp_path / f"{index:02d}.png")
        Image.new("RGB", (40 + index, 30), (20 * index,) * 3).save(found[-1])
        if index in BAD:
            found[-1].write_bytes(found[-1].read_bytes()[:40])
    return found


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 50])
def test_order_batches_and_skips(files: list[Path], workers: int, batch_size: int) -> None:
    stream = ImageStream(files, fit, batch_size=batch_size, num_workers=workers)
    for _ in range(2):  # it may be run again
        batches = list(stream)
        seen = [index for indices, _ in batches for index in indices]
        assert seen == [index for index in range(11) if index not in BAD]
        assert [len(indices) for indices, _ in batches][:-1] == [batch_size] * (len(batches) - 1)
        for indices, fitted in batches:
            assert fitted.pixels.shape == (len(indices), 3, 28, 42)
            assert torch.equal(fitted.pixels, fit([Image.open(files[index]) for index in indices]).pixels)
            assert [place.original_size for place in fitted.placements] == [(30, 40 + index) for index in indices]
        assert [path for path, _ in stream.skipped] == [files[index] for index in BAD]
        assert all("not an image" in reason for _, reason in stream.skipped)
        assert stream.note == fit([Image.open(files[index]) for index in seen]).note


@pytest.mark.parametrize("workers", [0, 2])
def test_none_left(files: list[Path], workers: int) -> None:
    with pytest.raises(ValueError, match=r"none of 3 image.*02\.png"):
        list(ImageStream([files[index] for index in BAD], fit, batch_size=2, num_workers=workers))
    with pytest.raises(ValueError, match="no images"):
        list(ImageStream([], fit, batch_size=2, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 3])
def test_what_fit_raises_arrives(files: list[Path], workers: int) -> None:
    def picky(images: list[Image.Image]) -> FittedImages:
        if images[0].width == 45:
            raise ValueError("this one will not do")
        return fit(images)

    with pytest.raises(ValueError, match="will not do"):
        list(ImageStream(files, picky, batch_size=2, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 3])
def test_few_images_are_read_ahead(files: list[Path], workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files there are, reading stays close to what was asked for."""
    read = []
    monkeypatch.setattr(module, "load_image", lambda path: read.append(path) or Image.new("RGB", (42, 28)))
    stream = iter(ImageStream([Path(f"{index}.png") for index in range(1000)], fit, batch_size=2, num_workers=workers))
    for taken in range(1, 4):
        next(stream)
        assert 2 * taken <= len(read) <= 2 * taken + (2 + workers + 1) * (workers > 0)
    stream.close()
    assert len(read) < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("regista-images")]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="batch_size is at least 1"):
        ImageStream([], fit, batch_size=0)
    with pytest.raises(ValueError, match="num_workers 0"):
        ImageStream([], fit, batch_size=1, num_workers=-1)


def test_the_door_has_every_name() -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert np.ndim(fit([Image.new("RGB", (5, 5))]).pixels) == 4
