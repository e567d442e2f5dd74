"""A comparison as one picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.report.compare_poster import GAP, LEFT, SIDE, TOP, WIDTH, comparison_picture
from regista.results import RunFolder
from tests.report.compared_runs import CURED, SAME, SICK, compared, make_comparison
from tests.report.run_folders import FakeModel


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = (SICK, compared("reference")), (CURED, compared("cured"))
    return make_comparison(tmp_path_factory.mktemp("runs") / "two", *pairs)


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def test_one_row_a_model(run: Path, tmp_path: Path) -> None:
    pixels = pixels_of(comparison_picture(run, tmp_path / "images" / "two.png", image=1))
    assert pixels.shape[1] == WIDTH
    photo = RunFolder.open(run).read_arrays("arrays/00")["thumbnails"][1].reshape(-1, 3)
    middle = pixels[TOP + 80 : TOP + SIDE - 80, LEFT + 10 : LEFT + SIDE - 10].reshape(-1, 3)
    assert abs(middle.mean(0) - photo.mean(0)).max() < 40
    red = (pixels[..., 0] > 200) & (pixels[..., 1] < 90) & (pixels[..., 2] < 80)
    third = LEFT + 2 * (SIDE + GAP)
    red[:, :third], red[:, third + SIDE :] = False, False
    row = TOP + SIDE
    assert red[:row].sum() > 100 * max(1, red[row:].sum())  # outliers in the first model alone
    green = (abs(pixels - [11, 122, 94]).sum(-1) < 20)[:, :LEFT]
    assert green[row:].sum() > 100  # the word "Cured"
    assert green[:row].sum() == 0
    again = comparison_picture(run, tmp_path / "again.png", image=1)
    assert again.read_bytes() == (tmp_path / "images" / "two.png").read_bytes()


def test_grows_with_the_models_up_to_four(run: Path, tmp_path: Path) -> None:
    heights = []
    for count in (2, 5):
        pairs = [(SICK, compared("reference")), *[(SAME, compared("no gain"))] * (count - 1)]
        path = make_comparison(tmp_path / f"run{count}", *pairs)
        heights.append(pixels_of(comparison_picture(path, tmp_path / f"{count}.png")).shape[0])
    assert heights[1] - heights[0] == (4 - 2) * (SIDE + GAP)


def test_what_it_needs(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image 3 of 3"):
        comparison_picture(run, tmp_path / "a.png", image=3)
    blind = FakeModel("blind", without=["pca_maps"])
    path = make_comparison(tmp_path / "run", (SICK, compared("reference")), (blind, compared("cured")))
    with pytest.raises(ValueError, match="blind has no pca_maps"):
        comparison_picture(path, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
