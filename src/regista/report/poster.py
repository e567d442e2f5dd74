"""One wide picture of a run for a front page: a clean model above one with artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

from regista.report.comparison import relative_norms
from regista.report.entry import ModelEntry
from regista.report.formatting import percent, times
from regista.report.gallery import Arrays
from regista.report.maps import Scale, border_lines, colour_bytes, dimmed, norm_scale
from regista.report.reading import open_run
from regista.results.writing import write_whole

WIDTH, HEIGHT, DOTS = 1600, 880, 100
SIDE, LEFT, TOP, GAP = 330, 216, 96, 14
INK, MUTED, GOOD, BAD, FOUND = "#1d2126", "#5c6570", "#0b7a5e", "#c8371b", "#ff3d1f"
NEEDED = ("thumbnails", "norm_maps", "outlier_masks", "pca_maps")
HEADINGS = (
    ("Photo", "as the model saw it"),
    ("Patch norms", "one square is one patch"),
    ("Outlier tokens", "on the photo, in red"),
    ("Features (PCA)", "equal colour: alike to the model"),
)


def demo_picture(run_folder: Path, path: Path, *, image: int | None = None) -> Path:
    """Draw a clean and a sick model on one image: photo, patch norms, outliers, PCA colours; 1600 x 880 px.

    Args:
        run_folder: A run with at least one clean model and one with artifacts, such as ``regista demo`` makes.
        path: Where the PNG goes.
        image: Which of the pictured images; by default the one with most outliers.

    Raises:
        ValueError: if the run lacks such models, maps or the image.
    """
    run = open_run(Path(run_folder))
    chosen = []
    for sick in (False, True):
        entry = next((entry for entry in run.entries if (entry.verdict != "clean") == sick), None)
        if entry is None:
            raise ValueError(
                f"{run_folder}: the picture shows a clean model and a sick one; `regista demo` makes such a run"
            )
        chosen.append((entry, run.arrays(entry)))
    for entry, arrays in chosen:
        missing = [name for name in NEEDED if name not in arrays]
        if missing:
            raise ValueError(f"{run_folder}: {entry.model} has no {', '.join(missing)}; make the run again")
    count = min(len(arrays["norm_maps"]) for _, arrays in chosen)
    index = int(chosen[1][1]["outlier_masks"][:count].sum((1, 2)).argmax()) if image is None else image
    if not 0 <= index < count:
        raise ValueError(f"image {index} of {count} pictured ones (counted from 0)")
    figure = _drawn(chosen, index)

    def write(partial: Path) -> None:
        figure.savefig(partial, format="png", dpi=DOTS, metadata={"Software": None})

    write_whole(Path(path), write)
    return Path(path)


def _drawn(chosen: Sequence[tuple[ModelEntry, Arrays]], index: int) -> Figure:
    relative = relative_norms([entry for entry, _ in chosen], [arrays["norm_maps"] for _, arrays in chosen])
    scale = norm_scale(np.concatenate([values[index].ravel() for values in relative]), 1.0)
    with rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH / DOTS, HEIGHT / DOTS), facecolor="white")
        FigureCanvasAgg(figure)
        for column, (heading, below) in enumerate(HEADINGS):
            _text(figure, _x(column), 34, heading, 16, INK, weight="bold")
            _text(figure, _x(column), 66, below, 11, MUTED)
        for row, ((entry, arrays), values) in enumerate(zip(chosen, relative, strict=True)):
            _label(figure, row, entry)
            for column, picture in enumerate(_pictures(arrays, values, index, scale)):
                axes = figure.add_axes(_box(_x(column), _y(row), SIDE, SIDE))
                axes.axis("off")
                axes.set_facecolor("white")
                picture(axes)
        _bar(figure, scale)
    return figure


def _pictures(arrays: Arrays, relative: np.ndarray, index: int, scale: Scale) -> list[Callable[[Axes], None]]:
    photo, mask = (
        Image.fromarray(np.ascontiguousarray(arrays["thumbnails"][index])),
        arrays["outlier_masks"][index].astype(bool),
    )
    rows, cols = mask.shape
    extent = (0.0, float(cols), float(rows), 0.0)

    def shown(picture: np.ndarray, *, nearest: bool = True) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            axes.imshow(picture, extent=extent, interpolation="nearest" if nearest else "lanczos")

        return draw

    def norms(axes: Axes) -> None:
        shown(colormaps[scale.colours](scale.place(relative[index])))(axes)
        axes.add_collection(LineCollection(border_lines(mask), colors="#3ff0ff", linewidths=0.9))

    def outliers(axes: Axes) -> None:
        shown(np.asarray(dimmed(photo).convert("RGB")), nearest=False)(axes)
        colour = np.zeros((rows, cols, 4))
        colour[mask] = (1.0, 0.24, 0.12, 0.75)
        shown(colour)(axes)
        axes.add_collection(LineCollection(border_lines(mask), colors=FOUND, linewidths=1.2))

    return [shown(np.asarray(photo), nearest=False), norms, outliers, shown(colour_bytes(arrays["pca_maps"][index]))]


def _label(figure: Figure, row: int, entry: ModelEntry) -> None:
    sick = entry.verdict != "clean"
    top = _y(row) + 112
    _text(figure, 30, top, entry.model, 13, INK, weight="bold")
    _text(figure, 30, top + 34, "Artifacts" if sick else "Clean", 19, BAD if sick else GOOD, weight="bold")
    lines = ["no outlier norms"]
    if sick:
        lines = [f"{percent(entry.share)} of patches,", f"{times(entry.ratio)} the median"]
        lines += [] if entry.onset_block is None else [f"from block {entry.onset_block} on"]
        lines += ["planted on purpose"] if entry.planted is not None else []
    for number, line in enumerate(lines):
        _text(figure, 30, top + 74 + 23 * number, line, 11, MUTED)


def _bar(figure: Figure, scale: Scale) -> None:
    """The colour bar under the norms."""
    top = _y(1) + SIDE + 20
    axes = figure.add_axes(_box(_x(1), top, SIDE, 14))
    axes.imshow(colormaps[scale.colours](np.linspace(0, 1, 256))[None], aspect="auto", extent=(0, 100, 0, 1))
    axes.axis("off")
    for place, label in scale.ticks():
        _text(figure, _x(1) + SIDE * place / 100, top + 24, label, 10, MUTED, ha="center")
    _text(figure, _x(1) + SIDE / 2, top + 44, "norm / median" + (" (log)" if scale.log else ""), 10, MUTED, ha="center")


def _text(figure: Figure, x: float, y: float, text: str, size: float, colour: str, **options: Any) -> None:
    """Text with its upper left corner at (x, y) pixels from the upper left corner of the picture."""
    figure.text(x / WIDTH, 1 - y / HEIGHT, text, fontsize=size, color=colour, va="top", **options)


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x / WIDTH, 1 - (y + height) / HEIGHT, width / WIDTH, height / HEIGHT


def _x(column: int) -> float:
    return LEFT + column * (SIDE + GAP)


def _y(row: int) -> float:
    return TOP + row * (SIDE + GAP)
