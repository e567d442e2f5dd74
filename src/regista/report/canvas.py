"""A picture measured in pixels from its upper left corner, on which posters are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

from regista.report.maps import Scale, border_lines, dimmed
from regista.results.writing import write_whole

DOTS = 100
INK, MUTED, GOOD, BAD, FOUND = "#1d2126", "#5c6570", "#0b7a5e", "#c8371b", "#ff3d1f"


class Canvas:
    """A white picture of ``width`` x ``height`` pixels; made by ``blank_canvas``."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self.figure = Figure(figsize=(width / DOTS, height / DOTS), facecolor="white")
        FigureCanvasAgg(self.figure)

    def text(self, x: float, y: float, text: str, size: float, colour: str, **options: Any) -> None:
        """Text with its upper left corner at (x, y)."""
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, color=colour, va="top", **options)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Empty axes with their upper left corner at (x, y)."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.axis("off")
        axes.set_facecolor("white")
        return axes

    def colour_bar(self, scale: Scale, x: float, y: float, width: float, unit: str) -> None:
        """The colours of a scale with ticks and the unit below."""
        axes = self.axes(x, y, width, 14)
        axes.imshow(colormaps[scale.colours](np.linspace(0, 1, 256))[None], aspect="auto", extent=(0, 100, 0, 1))
        for place, label in scale.ticks():
            self.text(x + width * place / 100, y + 24, label, 10, MUTED, ha="center")
        self.text(x + width / 2, y + 44, unit + (" (log)" if scale.log else ""), 10, MUTED, ha="center")

    def save(self, path: Path) -> Path:
        """Write it as PNG, whole or not at all."""

        def write(partial: Path) -> None:
            self.figure.savefig(partial, format="png", dpi=DOTS, metadata={"Software": None})

        write_whole(path, write)
        return path


@contextmanager
def blank_canvas(width: int, height: int) -> Iterator[Canvas]:
    """A canvas, with the letters that posters are set in, whatever the user's settings."""
    with rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        yield Canvas(width, height)


def draw_picture(axes: Axes, picture: np.ndarray, grid_size: tuple[int, int], *, smooth: bool = False) -> None:
    """A picture over a patch grid of (rows, cols), one unit a patch."""
    rows, cols = grid_size
    extent = (0.0, float(cols), float(rows), 0.0)
    axes.imshow(picture, extent=extent, interpolation="lanczos" if smooth else "nearest")


def draw_norms(axes: Axes, relative: np.ndarray, mask: np.ndarray, scale: Scale) -> None:
    """Norms (rows, cols) in colours, outliers outlined."""
    draw_picture(axes, colormaps[scale.colours](scale.place(relative)), _grid(mask))
    axes.add_collection(LineCollection(border_lines(mask), colors="#3ff0ff", linewidths=0.9))


def draw_outliers(axes: Axes, photo: np.ndarray, mask: np.ndarray) -> None:
    """Outliers in red on a dimmed photo (height, width, 3)."""
    dark = dimmed(Image.fromarray(np.ascontiguousarray(photo))).convert("RGB")
    draw_picture(axes, np.asarray(dark), _grid(mask), smooth=True)
    colour = np.zeros((*mask.shape, 4))
    colour[mask] = (1.0, 0.24, 0.12, 0.75)
    draw_picture(axes, colour, _grid(mask))
    axes.add_collection(LineCollection(border_lines(mask), colors=FOUND, linewidths=1.2))


def _grid(mask: np.ndarray) -> tuple[int, int]:
    return mask.shape[0], mask.shape[1]
