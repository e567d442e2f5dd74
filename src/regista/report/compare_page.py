"""The page of a comparison: verdicts, one table, and the same images in every model."""

from __future__ import annotations

from dataclasses import dataclass

from regista.report.compare_entry import ComparedEntry, read_compared
from regista.report.compare_pictures import compared_pictures
from regista.report.compare_words import MEANINGS, Value, comparison_title, limits, subtitle_words, table_row
from regista.report.reading import DiagnosisRun
from regista.report.templating import template

# Pictured images for so many models, so that a page stays small enough to be mailed.
PICTURED = ((2, 6), (3, 4), (5, 3), (8, 2))


@dataclass(frozen=True)
class ModelLine:
    """A model and its numbers in the table."""

    model: ComparedEntry
    values: list[Value]


def render_comparison(run: DiagnosisRun) -> str:
    """The page as text.

    Raises:
        ValueError: if the record is no comparison, or arrays are missing or damaged.
    """
    models = read_compared(run.record.models)
    arrays = [run.arrays(model.entry) for model in models]
    most = next((rows for number, rows in PICTURED if len(models) <= number), 1)
    pictures = compared_pictures(models, arrays, most)
    used = {model.verdict for model in models}
    return template("compare.html.j2").render(
        run=run,
        title=comparison_title(models),
        subtitle=subtitle_words(models, str(run.record.created)),
        models=models,
        lines=[ModelLine(model, table_row(model)) for model in models],
        meanings=[(word, meaning, word in used) for word, meaning in MEANINGS.items()],
        limits=limits(models, run.record.notes),
        pictures=pictures,
        left_out=max(models[0].entry.image_count - len(pictures.blocks), 0) if pictures else 0,
    )
