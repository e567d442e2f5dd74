"""Rows of pictures: one row an image, one column a kind of map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from regista.report.entry import ModelEntry
from regista.report.maps import Scale, cell_path, map_uri, outline_path

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Bar:
    """A colour bar: gradient, ticks and marks at (percent, label), and the unit in words."""

    gradient: str
    ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    unit: str


@dataclass(frozen=True)
class Cell:
    """One picture; ``overlays`` are (class, SVG path) in units of patches, ``view`` is "cols rows"."""

    uri: str
    alt: str
    note: str = ""
    overlays: list[tuple[str, str]] = field(default_factory=list)
    view: str = ""


@dataclass(frozen=True)
class Column:
    """A heading, how to read the pictures below it, at length and in a few words, and one picture an image."""

    heading: str
    caption: str
    cells: list[Cell]
    bar: Bar | None = None
    brief: str = ""


@dataclass(frozen=True)
class Legend:
    """How to read a kind of picture."""

    heading: str
    caption: str
    bar: Bar | None


@dataclass(frozen=True)
class Gallery:
    """Pictures of some images side by side, and how to read them."""

    columns: list[Column]
    rows: int
    legends: list[Legend]


def arranged(columns: Sequence[Column | None], rows: int, *legends: Legend) -> Gallery | None:
    """Columns that there are, with their captions as legends before ``legends``; None without any."""
    found = [column for column in columns if column is not None]
    if not found or rows < 1:
        return None
    own = [Legend(column.heading, column.caption, column.bar) for column in found if column.caption]
    return Gallery(found, rows, [*own, *legends])


def colour_bar(scale: Scale, unit: str, marks: Sequence[tuple[float, str]] = ()) -> Bar:
    """The bar of a scale; ``marks`` are (value, label)."""
    placed = [(scale.percent(value), label) for value, label in marks]
    return Bar(scale.gradient(), scale.ticks(), placed, unit + (", logarithmic" if scale.log else ""))


def map_cell(values: np.ndarray, scale: Scale, alt: str, note: str, outlined: np.ndarray | None = None) -> Cell:
    """A (rows, cols) map as a picture, a mask outlined on it."""
    overlays = [("outline", outline_path(outlined))] if outlined is not None else []
    return Cell(map_uri(values, scale), f"{alt}: {note}" if note else alt, note, overlays, view(values))


def mask_overlays(mask: np.ndarray, planted: np.ndarray | None) -> list[tuple[str, str]]:
    """Found cells filled and outlined; planted ones that were not found outlined."""
    found = mask.astype(bool)
    overlays = [("found", cell_path(found)), ("found-line", outline_path(found))]
    if planted is not None:
        overlays.append(("missed", outline_path(planted.astype(bool) & ~found)))
    return overlays


def view(values: np.ndarray) -> str:
    """The grid of a (rows, cols, ...) map as SVG wants it."""
    return f"{values.shape[1]} {values.shape[0]}"


def image_name(entry: ModelEntry, index: int) -> str:
    """Name of a pictured image."""
    return entry.image_names[index] if index < len(entry.image_names) else f"image {index}"
