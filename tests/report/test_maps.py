"""Maps become the right colours at the right places."""

from __future__ import annotations

import re

import matplotlib as mpl
import numpy as np
import pytest

from regista.report.maps import Scale, border_lines, cell_path, map_uri, norm_scale, outline_path, photo_uri
from tests.report.test_html import decoded


@pytest.mark.parametrize("log", [False, True])
def test_map_has_matplotlibs_colours(log: bool) -> None:
    values = np.random.default_rng(0).uniform(0.5, 30, (5, 8))
    scale = Scale(1.0, 25.0, "inferno", log=log)
    shown = decoded(map_uri(values, scale))
    factor = shown.shape[0] // 5
    assert shown.shape == (5 * factor, 8 * factor, 3)
    norm = mpl.colors.LogNorm(1, 25, clip=True) if log else mpl.colors.Normalize(1, 25, clip=True)
    wanted = 255 * mpl.colormaps["inferno"](norm(values))[..., :3]
    for row in range(5):
        for col in range(8):
            square = shown[row * factor : (row + 1) * factor, col * factor : (col + 1) * factor].reshape(-1, 3)
            assert (square == square[0]).all()
            assert np.abs(square[0] - wanted[row, col]).max() <= 6  # one step of 256


def test_first_row_is_on_top() -> None:
    shown = decoded(map_uri(np.array([[1.0, 1.0], [0.0, 0.0]]), Scale(0, 1, "inferno")))
    assert shown[0].mean() > 150 > shown[-1].mean()


def test_healthy_norms_are_an_even_tone() -> None:
    healthy = np.random.default_rng(0).normal(47, 3, (20, 20))
    scale = norm_scale(healthy, 47.0)
    assert (scale.low, scale.log) == (0.0, False)
    assert scale.high == pytest.approx(4 * 47)
    sick = healthy.copy()
    sick[3, 4] = 300
    assert norm_scale(sick, 47.0).high == 300
    assert norm_scale(sick, None).high == 300
    sick[3, 4] = 5000
    assert norm_scale(sick, 47.0).log
    places = norm_scale(sick, 47.0).place(sick)
    assert places[3, 4] == 1
    assert np.delete(places.ravel(), 3 * 20 + 4).max() < 0.3


@pytest.mark.parametrize("values", [np.zeros((3, 3)), np.full((3, 3), 7.0)])
def test_constant_maps(values: np.ndarray) -> None:
    shown = decoded(map_uri(values, norm_scale(values, None)))
    assert (shown == shown[0, 0]).all()


@pytest.mark.parametrize(
    "scale", [Scale(0, 339, "inferno"), Scale(0.5, 290, "inferno", log=True), Scale(-0.1, 0.9, "cividis")]
)
def test_ticks_are_where_their_values_are(scale: Scale) -> None:
    ticks = scale.ticks()
    assert 3 <= len(ticks) <= 10
    for place, label in ticks:
        value = float(label.replace(",", ""))
        low, high, value = (np.log((scale.low, scale.high, value))) if scale.log else (scale.low, scale.high, value)
        assert place == pytest.approx(100 * (value - low) / (high - low), abs=0.01)


def test_gradient_is_the_colour_map() -> None:
    colours = re.findall(r"#(..)(..)(..)", Scale(0, 1, "viridis").gradient())
    wanted = np.round(255 * mpl.colormaps["viridis"](np.linspace(0, 1, len(colours)))[:, :3])
    assert np.abs(np.array([[int(part, 16) for part in colour] for colour in colours]) - wanted).max() <= 2


def test_borders() -> None:
    mask = np.random.default_rng(0).random((6, 9)) < 0.3
    wanted = set()
    for row in range(6):
        for col in range(9):
            for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                other = (row + down, col + right)
                inside = 0 <= other[0] < 6 and 0 <= other[1] < 9 and mask[other]
                if mask[row, col] and not inside:
                    corner = (col + (right == 1), row + (down == 1))
                    wanted.add((corner, (corner[0] + (down != 0), corner[1] + (right != 0))))
    lines = border_lines(mask)
    assert set(lines) == wanted
    assert len(lines) == len(wanted)
    assert len(re.findall("M", outline_path(mask))) == len(wanted)
    cells = {(int(row), int(col)) for col, row in re.findall(r"M(\d+) (\d+)h1v1h-1z", cell_path(mask))}
    assert cells == {(row, col) for row, col in np.argwhere(mask).tolist()}
    assert outline_path(np.zeros((2, 2), bool)) == cell_path(np.zeros((2, 2), bool)) == ""
    assert outline_path(np.array([[False, True]])) == "M1 0h1M1 1h1M1 0v1M2 0v1"


def test_photos() -> None:
    pixels = np.zeros((700, 350, 3), np.uint8)
    pixels[:350, :, 0] = 250
    shown = decoded(photo_uri(pixels))
    assert shown.shape == (400, 200, 3)
    assert shown[50, 100, 0] > 230 > 30 > shown[50, 100, 1]
    grey = decoded(photo_uri(pixels, grey=True)).astype(int)
    assert np.abs(grey - grey.mean(-1, keepdims=True)).max() <= 2
    assert grey.max() < 170
    assert decoded(photo_uri(pixels[:40, :50])).shape == (40, 50, 3)
