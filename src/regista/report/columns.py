"""The columns of a gallery: one kind of map each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regista.report.entry import ModelEntry
from regista.report.formatting import figure, file_name, percent, times
from regista.report.gallery import (
    Arrays,
    Cell,
    Column,
    Gallery,
    arranged,
    colour_bar,
    image_name,
    map_cell,
    mask_overlays,
    view,
)
from regista.report.maps import LOG_FROM, Scale, colour_uri, norm_scale, photo_uri

MOST_QUERIES = 9


def main_gallery(entry: ModelEntry, arrays: Arrays, rows: int) -> Gallery | None:
    """Photo, patch norms, outliers, attention of the first query, and PCA colours."""
    columns = [
        photos(entry, arrays, rows),
        norms(entry, arrays, rows),
        outliers(entry, arrays, rows),
        *attention(entry, arrays, rows)[:1],
        pca(entry, arrays, rows),
    ]
    return arranged(columns, rows)


def further_gallery(entry: ModelEntry, arrays: Arrays, rows: int) -> Gallery | None:
    """What else was measured: last norms, attention received, scores, consistency, attention of registers."""
    columns = [
        last_norms(entry, arrays, rows),
        received(entry, arrays, rows),
        scores(entry, arrays, rows),
        consistency(entry, arrays, rows),
        *attention(entry, arrays, rows)[1:MOST_QUERIES],
    ]
    if all(column is None for column in columns):
        return None
    return arranged([photos(entry, arrays, rows, caption=""), *columns], rows)


def photos(
    entry: ModelEntry,
    arrays: Arrays,
    rows: int,
    caption: str = "The image as the model saw it, after resizing or cropping.",
) -> Column | None:
    """The images as the model saw them."""
    pixels = arrays.get("thumbnails")
    if pixels is None:
        return None
    names = [image_name(entry, index) for index in range(rows)]
    cells = [Cell(photo_uri(pixels[index]), f"photo {name}", file_name(name)) for index, name in enumerate(names)]
    return Column("Photo", caption, cells, brief="as the model saw it")


def norms(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Norms at the outlier block, outliers outlined."""
    maps, masks = arrays.get("norm_maps"), arrays.get("outlier_masks")
    if maps is None:
        return None
    block = entry.shown_block
    median = median_norm(entry, maps)
    scale = norm_scale(maps, median)
    marks = [(median, f"median {figure(median)}")]
    marks += [] if entry.cutoff is None else [(entry.cutoff, f"cutoff {figure(entry.cutoff)}")]
    cells = []
    for index in range(rows):
        largest = float(maps[index].max())
        note = f"max {figure(largest)}" + (f" = {times(largest / median)} median" if median > 0 else "")
        alt = f"patch norms of {image_name(entry, index)}"
        cells.append(map_cell(maps[index], scale, alt, note, None if masks is None else masks[index]))
    caption = (
        f"Length of each patch token {'' if block is None else f'after block {block}, '}before the final norm; "
        "a square is a patch. Healthy: an even tone. Artifacts: single bright squares, outlined."
    )
    return Column("Patch norms", caption, cells, colour_bar(scale, "norm", marks), "bright squares are artifacts")


def outliers(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Outliers on the dimmed photo; against what was planted, if anything was."""
    pixels, masks, planted = (arrays.get(name) for name in ("thumbnails", "outlier_masks", "planted_masks"))
    if pixels is None or masks is None:
        return None
    cells = []
    for index in range(rows):
        note = f"{int(masks[index].sum()):,} of {masks[index].size:,} patches"
        overlays = mask_overlays(masks[index], None if planted is None else planted[index])
        alt = f"outliers in {image_name(entry, index)}: {note}"
        cells.append(Cell(photo_uri(pixels[index], grey=True), alt, note, overlays, view(masks[index])))
    caption = "Where the outlier tokens sit on the picture: red squares"
    caption += "; dashed blue squares were planted but not found." if planted is not None else "."
    return Column("Outliers", caption, cells, brief="where they sit, in red")


def attention(entry: ModelEntry, arrays: Arrays, rows: int) -> list[Column]:
    """One column a query: where it looks in the last block."""
    maps = arrays.get("attention_maps")
    if maps is None:
        return []
    count = maps.shape[1]
    queries = [*entry.attention_queries, *(f"query {index}" for index in range(len(entry.attention_queries), count))]
    columns = []
    for position, name in enumerate(queries[:count]):
        caption = (
            f"Attention of {name} over the patches, last block, mean over heads; each map from 0 to its own maximum."
        )
        if name == "CLS":
            caption += " In large models this is no proof of what the model looks at."
        if name == "mean over queries":
            caption = (
                "Attention each patch receives in the last block, mean over heads and all queries: there is no CLS."
            )
        columns.append(_own_scale(entry, f"Attention: {name}", caption, maps.take(position, axis=1), rows, percent))
    return columns


def pca(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """The first three principal components as colours."""
    maps = arrays.get("pca_maps")
    if maps is None:
        return None
    cells = [Cell(colour_uri(maps[index]), f"PCA colours of {image_name(entry, index)}") for index in range(rows)]
    caption = (
        "Three main directions of the final patch features as red, green and blue, the same for all images: equal "
        "colours are alike to the model. Healthy: smooth areas that follow things. Artifacts: odd specks."
    )
    return Column("Features (PCA)", caption, cells, brief="equal colour: alike to the model")


def last_norms(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Norms at the last block, where that is another than the one shown above."""
    maps = arrays.get("norm_maps_last")
    if maps is None or entry.depth is None or entry.shown_block in (None, entry.depth - 1):
        return None
    curve = entry.curves.median
    scale = norm_scale(maps, curve[-1] if curve else None)
    caption = f"Patch norms after the last block ({entry.depth - 1}), on a scale of their own."
    return _shared(
        entry, ("Last block norms", "bright squares are artifacts", caption, "norm"), maps, scale, rows, _largest
    )


def received(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Attention received at the block of the sinks, in multiples of the mean patch."""
    maps = arrays.get("received_maps")
    if maps is None:
        return None
    block = entry.number("attention_sink", "block")
    even = maps.mean(axis=(1, 2), keepdims=True)
    relative = maps / np.where(even > 0, even, 1.0)
    where = "" if block is None else f" at block {block:.0f}"
    caption = f"Attention each patch receives{where} from all tokens together. Sinks: single bright squares."
    most = max(float(relative.max()), 3.0)
    scale = Scale(0.5, most, "viridis", log=True) if most > LOG_FROM else Scale(0.0, most, "viridis")
    words = ("Attention received", "bright: draws attention", caption, "times the mean patch")
    return _shared(entry, words, relative, scale, rows, _largest_times)


def scores(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Cosine of each patch to the image vector."""
    maps = arrays.get("score_maps")
    if maps is None:
        return None
    caption = "Cosine of each patch to the image vector. Bright on the background means that the vector is made there."
    low, high = (float(value) for value in np.quantile(maps, (0.005, 0.995)))
    scale = Scale(low, max(high, low + 1e-6), "cividis")
    return _shared(entry, ("Patch score", "bright: like the image vector", caption, "cosine"), maps, scale, rows)


def consistency(entry: ModelEntry, arrays: Arrays, rows: int) -> Column | None:
    """Cosine of each patch to itself in shifted images."""
    maps = arrays.get("consistency_maps")
    if maps is None:
        return None
    scale = Scale(min(float(maps.min()), 0.9), 1.0, "magma")
    caption = (
        "How well a patch keeps its feature when the image is shifted; 1 is the same. Artifacts: single dark squares."
    )
    return _shared(entry, ("Consistency", "dark: changes under shifts", caption, "cosine"), maps, scale, rows)


def median_norm(entry: ModelEntry, maps: np.ndarray) -> float:
    """Median norm at the shown block: of all images as recorded, else of the pictured ones."""
    block, curve = entry.shown_block, entry.curves.median
    recorded = curve[block] if block is not None and block < len(curve) else None
    return recorded or float(np.median(maps))


def _range(values: np.ndarray) -> str:
    low, high = (round(float(value), 2) + 0.0 for value in (values.min(), values.max()))
    return f"{low:.2f} to {high:.2f}"


def _largest(values: np.ndarray) -> str:
    return f"max {figure(float(values.max()))}"


def _largest_times(values: np.ndarray) -> str:
    return f"max {times(float(values.max()))} mean"


def _shared(
    entry: ModelEntry,
    words: tuple[str, str, str, str],
    maps: np.ndarray,
    scale: Scale,
    rows: int,
    note: Callable[[np.ndarray], str] = _range,
) -> Column:
    heading, brief, caption, unit = words
    cells = [
        map_cell(maps[index], scale, f"{heading} of {image_name(entry, index)}", note(maps[index]))
        for index in range(rows)
    ]
    return Column(heading, caption, cells, colour_bar(scale, unit), brief)


def _own_scale(
    entry: ModelEntry, heading: str, caption: str, maps: np.ndarray, rows: int, words: Callable[[float], str]
) -> Column:
    cells = []
    for index in range(rows):
        largest = float(maps[index].max())
        scale = Scale(0.0, max(largest, 1e-30), "viridis")
        cells.append(map_cell(maps[index], scale, f"{heading} of {image_name(entry, index)}", f"max {words(largest)}"))
    return Column(heading, caption, cells, brief="bright: attended to")
