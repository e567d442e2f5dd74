"""Several models on the same images, and places of outliers over all images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regista.report.columns import median_norm, photos
from regista.report.entry import ModelEntry
from regista.report.formatting import percent, times
from regista.report.gallery import Arrays, Column, Gallery, Legend, arranged, colour_bar, map_cell
from regista.report.maps import NORM_COLOURS, Scale, norm_scale

MOST_MODELS = 4
MOST_IMAGES = 3


def side_by_side(entries: Sequence[ModelEntry], arrays: Sequence[Arrays]) -> Gallery | None:
    """Photo and the norm map of each model in multiples of its own median, all on one scale.

    Args:
        entries: The models, at most four: there is no room for more.
        arrays: Of each model.

    Returns:
        None if there are more models, their images differ, or maps are missing.
    """
    maps = [found["norm_maps"] for found in arrays if "norm_maps" in found]
    same_images = len({entry.image_names for entry in entries}) == 1
    if not 2 <= len(entries) <= MOST_MODELS or len(maps) < len(entries) or not same_images:
        return None
    if "thumbnails" not in arrays[0]:
        return None
    rows = min(MOST_IMAGES, *(len(found) for found in maps))
    relative = relative_norms(entries, maps)
    scale = norm_scale(np.concatenate([values.ravel() for values in relative]), 1.0)
    columns = [photos(entries[0], arrays[0], rows, caption="")]
    for entry, values, found in zip(entries, relative, arrays, strict=True):
        masks = found.get("outlier_masks")
        name = entry.model + (" (planted)" if entry.planted is not None else "")
        cells = []
        for index in range(rows):
            note = f"max {times(float(values[index].max()))} median"
            mask = None if masks is None else masks[index]
            cells.append(map_cell(values[index], scale, f"patch norms of {name}", note, mask))
        columns.append(Column(name, "", cells, brief="patch norms"))
    caption = (
        "Norms of the patch tokens as multiples of each model's own median, all on one scale. "
        "Healthy: an even tone. Artifacts: single bright squares, outlined."
    )
    bar = colour_bar(scale, "norm / median", [(1.0, "median")])
    return arranged(columns, rows, Legend("How to read", caption, bar))


def relative_norms(entries: Sequence[ModelEntry], maps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Norm maps (k, rows, cols) over the median of their model."""
    return [found / (median_norm(entry, found) or 1.0) for entry, found in zip(entries, maps, strict=True)]


def places_column(entry: ModelEntry, arrays: Arrays) -> Column | None:
    """How often each cell of the grid is an outlier; None without outliers or with one image."""
    frequency = arrays.get("position_frequency")
    if frequency is None or entry.image_count < 2 or not frequency.any():
        return None
    largest = float(frequency.max())
    scale = Scale(0.0, 100 * largest, NORM_COLOURS)
    words = f"the most frequent cell in {percent(largest)} of {entry.image_count} images"
    caption = (
        "Share of images in which each cell of the grid holds an outlier. "
        "A few bright cells: fixed places. A faint scatter: they move with the content."
    )
    cell = map_cell(100 * frequency, scale, "how often each cell is an outlier", words)
    return Column("How often each place is an outlier", caption, [cell], colour_bar(scale, "% of images"))
