"""The page of a run: one HTML file that holds everything and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from regista.report import figures, tables, wording
from regista.report.advice import Advice, advise
from regista.report.columns import further_gallery, main_gallery
from regista.report.compare_page import render_comparison
from regista.report.comparison import places_column, side_by_side
from regista.report.entry import ModelEntry, number
from regista.report.formatting import count, size_text
from regista.report.gallery import Column, Gallery
from regista.report.reading import DiagnosisRun, open_run
from regista.report.templating import template
from regista.results.writing import write_whole

FILE = "report.html"
# Pictured images a model, so that a page of many models stays small enough to be mailed.
PICTURED = ((2, 8), (4, 4), (8, 2))


@dataclass(frozen=True)
class ModelSection:
    """Everything the page shows of one model."""

    anchor: str
    entry: ModelEntry
    word: str
    claim: str
    planted: str
    checks: list[wording.Check]
    advice: Advice
    cautions: list[str]
    gallery: Gallery | None
    further: Gallery | None
    left_out: int
    onset: Markup | None
    histogram: Markup | None
    attention: Markup | None
    places: Column | None
    numbers: list[tuple[str, list[tables.Line]]]
    blocks: tables.Table | None
    registers: tables.Table | None


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` of a diagnosis or a comparison into its run folder, in place of the one there.

    The same folder gives the same bytes. Pictures lie inside the file; it loads nothing.

    Args:
        run_folder: What ``regista diagnose``, ``regista compare`` or ``regista demo`` wrote.

    Returns:
        Path of the page.

    Raises:
        ValueError: if it is no such run folder, is damaged, or cannot be written.
    """
    run = open_run(Path(run_folder))
    page = render(run).encode("utf-8")
    path = run.folder.path / FILE

    def write(partial: Path) -> None:
        partial.write_bytes(page)

    write_whole(path, write)
    return path


def render(run: DiagnosisRun) -> str:
    """The page as text.

    Raises:
        ValueError: if arrays are missing or damaged.
    """
    if run.record.kind == "comparison":
        return render_comparison(run)
    arrays = [run.arrays(entry) for entry in run.entries]
    by_hand = number(run.record.config.get("cutoff")) is not None
    most = next((rows for models, rows in PICTURED if len(run.entries) <= models), 1)
    sections = [
        model_section(entry, found, f"model-{index}", most, by_hand)
        for index, (entry, found) in enumerate(zip(run.entries, arrays, strict=True))
    ]
    several = len(sections) > 1
    return template("page.html.j2").render(
        run=run,
        title=page_title(run),
        subtitle=subtitle(run),
        sections=sections,
        table=tables.comparison(run.entries) if several else None,
        series=figures.series_chart(run.entries, "series") if run.record.kind == "checkpoints" else None,
        series_words=figures.series_words(run.entries),
        beside=side_by_side(run.entries, arrays) if several and run.record.kind != "checkpoints" else None,
    )


def model_section(
    entry: ModelEntry, arrays: Mapping[str, np.ndarray], anchor: str, most: int, cutoff_by_hand: bool
) -> ModelSection:
    """Pictures, charts and words about one model."""
    there = [len(arrays[name]) for name in ("thumbnails", "norm_maps", "pca_maps") if name in arrays]
    rows = min([*there, most]) if there else 0
    return ModelSection(
        anchor=anchor,
        entry=entry,
        word=wording.verdict_word(entry),
        claim=wording.claim(entry),
        planted=wording.planted_sentence(entry),
        checks=wording.checks(entry),
        advice=advise(entry),
        cautions=wording.cautions(entry, cutoff_by_hand=cutoff_by_hand),
        gallery=main_gallery(entry, arrays, rows),
        further=further_gallery(entry, arrays, rows),
        left_out=max(entry.image_count - rows, 0),
        onset=figures.onset_chart(entry, arrays, f"{anchor}-onset"),
        histogram=figures.histogram_chart(entry, arrays, f"{anchor}-histogram"),
        attention=figures.attention_chart(entry, f"{anchor}-attention"),
        places=places_column(entry, arrays),
        numbers=tables.all_numbers(entry),
        blocks=tables.by_block(entry),
        registers=tables.register_table(entry),
    )


def page_title(run: DiagnosisRun) -> str:
    """What the page is about, in a line."""
    if len(run.entries) == 1:
        return run.entries[0].model
    sick = sum(entry.verdict != "clean" for entry in run.entries)
    what = "checkpoints" if run.record.kind == "checkpoints" else "models"
    clean = len(run.entries) - sick
    return f"{len(run.entries)} {what}: {clean} clean, {sick} with artifacts"


def subtitle(run: DiagnosisRun) -> str:
    """Images, their size, and the day."""
    first: Any = run.entries[0]
    words = [count(first.image_count, "image")]
    if first.image_size is not None:
        words.append(size_text(first.image_size, " px"))
    return " · ".join([*words, str(run.record.created)[:10]])
