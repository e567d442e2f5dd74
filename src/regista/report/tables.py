"""Tables of a report: models side by side, all numbers of one model, its blocks and registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regista.report.entry import ModelEntry, mapping, number, numbers
from regista.report.formatting import NONE, figure, percent, shortened, size_text, times
from regista.report.wording import TITLES


@dataclass(frozen=True)
class Line:
    """One number: what it is called, its value, and what it says."""

    name: str
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A heading line and rows of the same length."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def comparison(entries: Sequence[ModelEntry]) -> Table:
    """One row a model; the name and the verdict are shown beside it."""
    head = ("outliers", "x median", "from block", "place", "sinks take", "by position", "registers", "other findings")
    return Table(head, [_compared(entry) for entry in entries])


def _compared(entry: ModelEntry) -> tuple[str, ...]:
    others = [TITLES.get(kind, kind).lower() for kind in entry.kinds if kind != "high-norm"]
    return (
        percent(entry.share),
        NONE if entry.ratio is None else figure(entry.ratio),
        _block(entry.onset_block),
        entry.place or NONE,
        percent(entry.number("attention_sink", "mass")),
        percent(entry.number("positional", "variance_explained")),
        str(entry.num_register_tokens),
        ", ".join(others) or NONE,
    )


def all_numbers(entry: ModelEntry) -> list[tuple[str, list[Line]]]:
    """Every number of one model in groups, those that were not measured left out."""
    groups = [
        ("Model and images", _setting(entry)),
        ("Attention", _attention(entry)),
        ("Features", _features(entry)),
        ("Norms", _norms(entry)),
    ]
    return [(title, [line for line in lines if line.value != NONE]) for title, lines in groups]


def _setting(entry: ModelEntry) -> list[Line]:
    prefix = ["CLS"] if entry.has_cls else ["no CLS"]
    prefix.append(f"{entry.num_register_tokens} registers" if entry.num_register_tokens else "no registers")
    return [
        Line("Model", entry.model, entry.library),
        Line("Images", f"{entry.image_count:,}", entry.note),
        Line("Image size", size_text(entry.image_size, " px"), "height x width"),
        Line("Patch grid", size_text(entry.grid_size), f"rows x columns, patches of {entry.patch_size} px"),
        Line("Blocks", NONE if entry.depth is None else str(entry.depth), "counted from 0"),
        Line("Other tokens", ", ".join(prefix), "as counted in the loaded model"),
        Line("Attention backend", entry.attention_backend or NONE),
    ]


def _norms(entry: ModelEntry) -> list[Line]:
    block = entry.shown_block
    at = f"after block {block}"
    cosine = mapping((entry.measures.get("high_norm") or {}).get("neighbour_cosine"))
    there = [_at(values, block) for values in (entry.curves.median, entry.curves.p99, entry.curves.largest)]
    planted = entry.planted
    return [
        Line("Outlier tokens", percent(entry.share), "share of all patch tokens above the cutoff"),
        Line("Their norm", times(entry.ratio), "median of the outliers over that of the other patches"),
        Line("Onset block", _block(entry.onset_block), "the first block whose output has the outliers"),
        Line("Outlier block", _block(entry.outlier_block), "where they stand out most; read for maps and cutoff"),
        Line("Cutoff", figure(entry.cutoff), "norm from which a token counts as an outlier"),
        Line("Median norm", figure(there[0]), at),
        Line("99th percentile", figure(there[1]), at),
        Line("Largest norm", figure(there[2]), at),
        Line("Place", entry.place or NONE, "moving: with the content; fixed: the same cells in every image"),
        Line(
            "Neighbour cosine of outliers",
            figure(number(cosine.get("outliers"))),
            "likeness to neighbours after patch embedding; near 1: plain areas such as sky or wall",
        ),
        Line("Neighbour cosine of others", figure(number(cosine.get("others"))), "the same, all other patches"),
        Line("Planted block", NONE if planted is None else _block(planted.block), "whose MLP was edited on purpose"),
        Line(
            "Precision", NONE if planted is None else percent(planted.precision), "of found outliers that were planted"
        ),
        Line("Recall", NONE if planted is None else percent(planted.recall), "of planted outliers that were found"),
    ]


def _attention(entry: ModelEntry) -> list[Line]:
    block = entry.number("attention_sink", "block")
    at = "" if block is None else f" (block {block:.0f})"
    return [
        Line(
            "Sink patches",
            percent(entry.number("attention_sink", "share")),
            f"patches that draw far more attention{at}",
        ),
        Line(
            "Attention they take",
            percent(entry.number("attention_sink", "mass")),
            "of all attention, all queries and heads",
        ),
        Line(
            "Strongest", times(entry.number("attention_sink", "strongest")), "attention of a sink over the median patch"
        ),
    ]


def _features(entry: ModelEntry) -> list[Line]:
    deviation = entry.number("lazy", "deviation")
    used, registers = entry.number("registers", "effective_number"), entry.num_register_tokens
    return [
        Line(
            "Explained by position",
            percent(entry.number("positional", "variance_explained")),
            "share of the variance of final patch features",
        ),
        Line("Shift consistency", figure(entry.number("inconsistent", "median_cosine")), "median cosine under shifts"),
        Line("Inconsistent patches", percent(entry.number("inconsistent", "share")), "far below that"),
        Line(
            "Hit ratio",
            percent(entry.number("lazy", "hit_ratio")),
            "the patch closest to the image vector is on an object",
        ),
        Line(
            "Chance",
            percent(entry.number("lazy", "chance")) + ("" if deviation is None else f" ± {percent(deviation)}"),
            "the same for a random patch",
        ),
        Line("Registers in use", NONE if used is None else f"{figure(used)} of {registers}", "effective number (rank)"),
    ]


def by_block(entry: ModelEntry) -> Table | None:
    """Norms, cutoff and outliers after every block."""
    curves = entry.curves
    depth = max(len(curve) for curve in (curves.median, curves.p99, curves.largest, curves.share, curves.cutoff))
    if not depth:
        return None
    rows = [
        (
            str(block),
            *(figure(_at(curve, block)) for curve in (curves.median, curves.p99, curves.largest, curves.cutoff)),
            percent(_at(curves.share, block)),
        )
        for block in range(depth)
    ]
    return Table(("block", "median", "99th percentile", "maximum", "cutoff", "outliers"), rows)


def register_table(entry: ModelEntry) -> Table | None:
    """Norm and attention of every register at the last block."""
    measured = entry.measures.get("registers") or {}
    norms, received = numbers(measured.get("norms")), numbers(measured.get("attention_received"))
    if not norms and not received:
        return None
    rows = [
        (str(index), figure(_at(norms, index)), percent(_at(received, index)))
        for index in range(max(len(norms), len(received)))
    ]
    return Table(("register", "norm", "attention received"), rows)


def short_model(entry: ModelEntry) -> str:
    """A model's name short enough for a column."""
    return shortened(entry.model, 40)


def _at(values: Sequence[float | None], index: int | None) -> float | None:
    return None if index is None or not 0 <= index < len(values) else values[index]


def _block(block: int | None) -> str:
    return NONE if block is None else str(block)
