"""A comparison as one picture for a front page: one image, one row a model, its verdict beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regista.report.canvas import BAD, GOOD, INK, MUTED, Canvas, blank_canvas, draw_norms, draw_outliers, draw_picture
from regista.report.compare_entry import ComparedEntry, read_compared
from regista.report.compare_pictures import compared_norms
from regista.report.formatting import cosine_text, cost_text, percent, shortened, times
from regista.report.gallery import Arrays
from regista.report.maps import colour_bytes, norm_scale
from regista.report.reading import open_run

WIDTH = 1600
TOP, LEFT, GAP, BELOW = 96, 250, 14, 90
MOST_MODELS = 4
NEEDED = ("thumbnails", "norm_maps", "outlier_masks", "pca_maps")
HEADINGS = (
    ("Photo", "as the models saw it"),
    ("Patch norms", "bright squares are artifacts"),
    ("Outlier tokens", "on the photo, in red"),
    ("Features (PCA)", "equal colour: alike to the model"),
)
SIDE = (WIDTH - LEFT - 20) // len(HEADINGS) - GAP


def comparison_picture(run_folder: Path, path: Path, *, image: int | None = None) -> Path:
    """Draw a comparison on one image: photo, patch norms, outliers and PCA colours of each model; 1600 px wide.

    Args:
        run_folder: What ``regista compare`` wrote; of more than four models the first four are drawn.
        path: Where the PNG goes.
        image: Which of the pictured images; by default the one with most outliers in all models.

    Raises:
        ValueError: if it is no comparison, or lacks maps or the image.
    """
    run = open_run(Path(run_folder))
    models = read_compared(run.record.models)[:MOST_MODELS]
    arrays = [run.arrays(model.entry) for model in models]
    for model, own in zip(models, arrays, strict=True):
        missing = [name for name in NEEDED if name not in own]
        if missing:
            raise ValueError(f"{run_folder}: {model.entry.model} has no {', '.join(missing)}; make the run again")
    count = min(len(own["norm_maps"]) for own in arrays)
    outliers = sum(own["outlier_masks"][:count].mean((1, 2)) for own in arrays)
    index = int(np.argmax(outliers)) if image is None else image
    if not 0 <= index < count:
        raise ValueError(f"image {index} of {count} pictured ones (counted from 0)")
    return _drawn(models, arrays, index).save(Path(path))


def _drawn(models: Sequence[ComparedEntry], arrays: Sequence[Arrays], index: int) -> Canvas:
    relative = compared_norms(models, arrays)
    scale = norm_scale(np.concatenate([values[index].ravel() for values in relative]), 1.0)
    with blank_canvas(WIDTH, round(_y(len(models)) + BELOW)) as drawn:
        for column, (heading, below) in enumerate(HEADINGS):
            drawn.text(_x(column), 34, heading, 16, INK, weight="bold")
            drawn.text(_x(column), 66, below, 11, MUTED)
        for row, (model, own, values) in enumerate(zip(models, arrays, relative, strict=True)):
            _label(drawn, row, model)
            photo, mask = own["thumbnails"][index], own["outlier_masks"][index].astype(bool)
            grid = (mask.shape[0], mask.shape[1])
            axes = [drawn.axes(_x(column), _y(row), SIDE, SIDE) for column in range(len(HEADINGS))]
            draw_picture(axes[0], photo, grid, smooth=True)
            draw_norms(axes[1], values[index], mask, scale)
            draw_outliers(axes[2], photo, mask)
            draw_picture(axes[3], colour_bytes(own["pca_maps"][index]), grid)
        drawn.colour_bar(scale, _x(1), _y(len(models)) + 6, SIDE, "norm / median")
    return drawn


def _label(drawn: Canvas, row: int, model: ComparedEntry) -> None:
    entry = model.entry
    name = textwrap.wrap(shortened(entry.model, 60), 20, break_long_words=True) or [""]
    word, colour = model.verdict, {"good": GOOD, "bad": BAD}.get(model.tone, INK)
    if model.reference:
        word, colour = (entry.verdict, GOOD if entry.verdict == "clean" else BAD)
    top = _y(row) + 70
    for number, line in enumerate(name):
        drawn.text(24, top + 21 * number, line, 12, INK, weight="bold")
    top += 21 * len(name) + 14
    drawn.text(24, top, word.capitalize(), 17 if len(word) > 12 else 19, colour, weight="bold")
    for number, line in enumerate(_lines(model)):
        drawn.text(24, top + 42 + 23 * number, line, 11, MUTED)


def _lines(model: ComparedEntry) -> list[str]:
    """What stands below the verdict."""
    entry = model.entry
    lines = [f"{percent(entry.share)} outliers" + (f", {times(entry.ratio)} median" if entry.ratio else "")]
    if not entry.share:
        lines = ["no outlier norms"]
    if model.reference:
        return [*lines, *(["planted on purpose"] if entry.planted is not None else []), "the reference"]
    if model.others is not None:
        lines.append(f"other patches: cosine {cosine_text(model.others.mean)}")
    if entry.num_register_tokens:
        lines.append(f"{entry.num_register_tokens} register" + ("s" if entry.num_register_tokens > 1 else ""))
    if model.cost is not None:
        lines.append(f"{cost_text(model.cost)} the cost" + (", within noise" if model.cost_is_noise else ""))
    return lines


def _x(column: int) -> float:
    return LEFT + column * (SIDE + GAP)


def _y(row: int) -> float:
    return TOP + row * (SIDE + GAP)
