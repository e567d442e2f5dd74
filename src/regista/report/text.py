"""The verdict for terminals: plain text without colours or control characters."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from regista.report.entry import ModelEntry, read_entry
from regista.report.formatting import NONE, percent, printable, shortened, times
from regista.report.wording import cautions, claim, planted_sentence

WIDTH = 96
MODEL_WIDTH = 44


def summary_text(record: Mapping[str, Any]) -> str:
    """The verdict on one model in a few lines.

    Args:
        record: ``Diagnosis.to_dict()``, or an entry of ``models`` of a run folder.

    Raises:
        ValueError: if it is no such entry.
    """
    entry = read_entry(record)
    kinds = f" ({', '.join(entry.kinds)})" if entry.kinds else ""
    lines = _wrapped(f"{entry.model}: {entry.verdict}{kinds}", "", "  ")
    sentences = entry.summary or (f"{claim(entry)}.",)
    lines += [line for sentence in sentences for line in _wrapped(sentence, "  - ", "    ")]
    remarks = [planted_sentence(entry), *(f"Caution: {caution}" for caution in cautions(entry))]
    lines += [line for remark in remarks if remark for line in _wrapped(remark, "  ! ", "    ")]
    return "\n".join(lines)


def summary_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Several models side by side, one a line.

    Args:
        records: As for ``summary_text``.

    Raises:
        ValueError: if one of them is no such entry.
    """
    head = ("model", "verdict", "kinds", "outliers", "norm", "from block", "place", "images")
    rows = [head, *(_row(read_entry(record)) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(entry: ModelEntry) -> tuple[str, ...]:
    return (
        shortened(printable(entry.model), MODEL_WIDTH) + (" (planted)" if entry.planted is not None else ""),
        printable(entry.verdict),
        printable(", ".join(entry.kinds)) or NONE,
        percent(entry.share),
        times(entry.ratio),
        NONE if entry.onset_block is None else str(entry.onset_block),
        printable(entry.place) or NONE,
        str(entry.image_count),
    )


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
