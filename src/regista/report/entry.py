"""One model's entry in the record of a diagnosis, read with care: files may be old, edited or foreign."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Curves:
    """Norms of the patch tokens after each block, over all images; None where the record has no number."""

    median: tuple[float | None, ...]
    p99: tuple[float | None, ...]
    largest: tuple[float | None, ...]
    share: tuple[float | None, ...]
    cutoff: tuple[float | None, ...]


@dataclass(frozen=True)
class Planted:
    """What was planted into the model on purpose, and how much of it the diagnosis found."""

    block: int | None
    kind: str
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class ModelEntry:
    """What a diagnosis says about one model. Blocks count from 0, shares are fractions.

    Attributes:
        model, library, verdict, kinds, summary: As in the record.
        planted: None for an ordinary model.
        image_count, image_names, image_size, skipped, note: The images; size is (height, width).
        grid_size: (rows, cols), or None.
        patch_size, depth, num_register_tokens, has_cls, attention_backend: The model.
        attention_queries: What each attention map shows.
        onset_block, outlier_block, cutoff, share, place: The outliers; place is "fixed" or "moving".
        curves: Norms by block.
        measures: {kind: its numbers}; None where a kind was not looked at.
        arrays: Name of its arrays in the run folder, "" if it has none.
    """

    model: str
    library: str
    verdict: str
    kinds: tuple[str, ...]
    summary: tuple[str, ...]
    planted: Planted | None
    image_count: int
    image_names: tuple[str, ...]
    image_size: tuple[int, int] | None
    skipped: tuple[tuple[str, str], ...]
    note: str
    grid_size: tuple[int, int] | None
    patch_size: int | None
    depth: int | None
    num_register_tokens: int
    has_cls: bool
    attention_backend: str
    attention_queries: tuple[str, ...]
    onset_block: int | None
    outlier_block: int | None
    cutoff: float | None
    share: float | None
    place: str
    curves: Curves
    measures: dict[str, dict[str, Any] | None]
    arrays: str

    @property
    def shown_block(self) -> int | None:
        """The block at which norms are shown: that of the outliers, else the last."""
        if self.outlier_block is not None:
            return self.outlier_block
        return None if self.depth is None else self.depth - 1

    @property
    def ratio(self) -> float | None:
        """Median norm of the outliers over that of the other patches."""
        return self.number("high_norm", "ratio")

    def number(self, measure: str, key: str) -> float | None:
        """A number of a measure, None if it was not measured."""
        return number((self.measures.get(measure) or {}).get(key))


def read_entry(record: Mapping[str, Any]) -> ModelEntry:
    """The entry of one model, from ``Diagnosis.to_dict()`` or the ``models`` of a run folder.

    Raises:
        ValueError: if it is no such entry.
    """
    if not isinstance(record, Mapping) or not record.get("model") or not record.get("verdict"):
        raise ValueError("not the diagnosis of a model (it has no model and verdict); make one with `regista diagnose`")
    images, measures = mapping(record.get("images")), mapping(record.get("measures"))
    high = mapping(measures.get("high_norm"))
    names = ("high_norm", "attention_sink", "positional", "inconsistent", "lazy", "registers")
    return ModelEntry(
        model=str(record["model"]),
        library=str(record.get("library") or ""),
        verdict=str(record["verdict"]),
        kinds=texts(record.get("kinds")),
        summary=texts(record.get("summary")),
        planted=_planted(record.get("planted")),
        image_count=whole(images.get("count")) or len(texts(images.get("names"))),
        image_names=texts(images.get("names")),
        image_size=pair(images.get("size")),
        skipped=tuple((str(item[0]), str(item[1])) for item in items(images.get("skipped")) if len(items(item)) == 2),
        note=str(images.get("note") or ""),
        grid_size=pair(record.get("grid_size")),
        patch_size=whole(record.get("patch_size")),
        depth=whole(record.get("depth")),
        num_register_tokens=whole(record.get("num_register_tokens")) or 0,
        has_cls=bool(record.get("has_cls")),
        attention_backend=str(record.get("attention_backend") or ""),
        attention_queries=texts(record.get("attention_queries")),
        onset_block=whole(record.get("onset_block")),
        outlier_block=whole(record.get("outlier_block")),
        cutoff=number(record.get("cutoff")),
        share=number(record.get("share")),
        place=str(record.get("fixed_place") or ""),
        curves=Curves(*(numbers(high.get(key)) for key in ("median", "p99", "max", "share", "cutoff"))),
        measures={name: (dict(value) if isinstance(value := measures.get(name), Mapping) else None) for name in names},
        arrays=str(record.get("arrays") or ""),
    )


def _planted(value: Any) -> Planted | None:
    if not isinstance(value, Mapping):
        return None
    precision, recall = number(value.get("precision")), number(value.get("recall"))
    return Planted(whole(value.get("block")), str(value.get("kind") or ""), precision, recall)


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    """A whole number of zero or more, else None."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def numbers(value: Any) -> tuple[float | None, ...]:
    """A list of numbers, None where an item is none."""
    return tuple(number(item) for item in items(value))


def pair(value: Any) -> tuple[int, int] | None:
    """Two whole numbers, such as (rows, cols), else None."""
    found = [whole(item) for item in items(value)]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return None
    return found[0], found[1]


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts."""
    return tuple(str(item) for item in items(value))


def items(value: Any) -> list[Any]:
    """A list, empty if it is none."""
    return list(value) if isinstance(value, (list, tuple)) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, empty if it is none."""
    return value if isinstance(value, Mapping) else {}
