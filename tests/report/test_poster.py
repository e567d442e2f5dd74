"""The wide picture for a front page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.report.poster import HEIGHT, WIDTH, demo_picture
from regista.results import RunFolder
from tests.report.run_folders import FakeModel, make_run


def test_shows_the_two_models(planted_run: Path, tmp_path: Path) -> None:
    path = demo_picture(planted_run, tmp_path / "images" / "demo.png", image=1)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    photo = RunFolder.open(planted_run).read_arrays("arrays/00")["thumbnails"][1].reshape(-1, 3)
    colours = np.unique(pixels.reshape(-1, 3), axis=0)
    assert len(colours) > 1000
    assert abs(pixels[120:420, 220:540].reshape(-1, 3).mean(0) - photo.mean(0)).max() < 40  # the first photo
    red = (pixels[..., 0] > 200) & (pixels[..., 1] < 90) & (pixels[..., 2] < 80)
    half = HEIGHT // 2
    assert red[half:, 900:1250].sum() > 10 * max(1, red[:half, 900:1250].sum())
    assert demo_picture(planted_run, tmp_path / "again.png", image=1).read_bytes() == path.read_bytes()


def test_takes_the_image_with_most_outliers(planted_run: Path, tmp_path: Path) -> None:
    masks = RunFolder.open(planted_run).read_arrays("arrays/01")["outlier_masks"]
    most = int(masks.sum((1, 2)).argmax())
    default = demo_picture(planted_run, tmp_path / "a.png").read_bytes()
    assert default == demo_picture(planted_run, tmp_path / "b.png", image=most).read_bytes()
    assert default != demo_picture(planted_run, tmp_path / "c.png", image=(most + 1) % 3).read_bytes()


def test_what_it_needs(planted_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image 3 of 3"):
        demo_picture(planted_run, tmp_path / "a.png", image=3)
    with pytest.raises(ValueError, match=r"clean model and a sick one.*regista demo"):
        demo_picture(make_run(tmp_path / "one", FakeModel()), tmp_path / "a.png")
    models = FakeModel(), FakeModel("sick", outliers=5.0, without=["pca_maps"])
    with pytest.raises(ValueError, match="sick has no pca_maps"):
        demo_picture(make_run(tmp_path / "two", *models), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
