"""One wide picture of a run for a front page: a clean model above one with artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regista.report.canvas import BAD, GOOD, INK, MUTED, Canvas, blank_canvas, draw_norms, draw_outliers, draw_picture
from regista.report.comparison import relative_norms
from regista.report.entry import ModelEntry
from regista.report.formatting import percent, times
from regista.report.gallery import Arrays
from regista.report.maps import colour_bytes, norm_scale
from regista.report.reading import open_run

WIDTH, HEIGHT = 1600, 880
SIDE, LEFT, TOP, GAP = 330, 216, 96, 14
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
    return _drawn(chosen, index).save(Path(path))


def _drawn(chosen: Sequence[tuple[ModelEntry, Arrays]], index: int) -> Canvas:
    relative = relative_norms([entry for entry, _ in chosen], [arrays["norm_maps"] for _, arrays in chosen])
    scale = norm_scale(np.concatenate([values[index].ravel() for values in relative]), 1.0)
    with blank_canvas(WIDTH, HEIGHT) as drawn:
        for column, (heading, below) in enumerate(HEADINGS):
            drawn.text(_x(column), 34, heading, 16, INK, weight="bold")
            drawn.text(_x(column), 66, below, 11, MUTED)
        for row, ((entry, arrays), values) in enumerate(zip(chosen, relative, strict=True)):
            _label(drawn, row, entry)
            photo, mask = arrays["thumbnails"][index], arrays["outlier_masks"][index].astype(bool)
            axes = [drawn.axes(_x(column), _y(row), SIDE, SIDE) for column in range(len(HEADINGS))]
            draw_picture(axes[0], photo, mask.shape, smooth=True)
            draw_norms(axes[1], values[index], mask, scale)
            draw_outliers(axes[2], photo, mask)
            draw_picture(axes[3], colour_bytes(arrays["pca_maps"][index]), mask.shape)
        drawn.colour_bar(scale, _x(1), _y(1) + SIDE + 20, SIDE, "norm / median")
    return drawn


def _label(drawn: Canvas, row: int, entry: ModelEntry) -> None:
    sick = entry.verdict != "clean"
    top = _y(row) + 112
    drawn.text(30, top, entry.model, 13, INK, weight="bold")
    drawn.text(30, top + 34, "Artifacts" if sick else "Clean", 19, BAD if sick else GOOD, weight="bold")
    lines = ["no outlier norms"]
    if sick:
        lines = [f"{percent(entry.share)} of patches,", f"{times(entry.ratio)} the median"]
        lines += [] if entry.onset_block is None else [f"from block {entry.onset_block} on"]
        lines += ["planted on purpose"] if entry.planted is not None else []
    for number, line in enumerate(lines):
        drawn.text(30, top + 74 + 23 * number, line, 11, MUTED)


def _x(column: int) -> float:
    return LEFT + column * (SIDE + GAP)


def _y(row: int) -> float:
    return TOP + row * (SIDE + GAP)
