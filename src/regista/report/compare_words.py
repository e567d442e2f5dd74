"""A comparison in words: title, table, what limits it, and plain text for terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regista.report.compare_entry import ComparedEntry, Likeness, read_compared
from regista.report.formatting import (
    NONE,
    cosine_text,
    cost_text,
    count,
    figure,
    millions,
    percent,
    printable,
    shortened,
    times,
)
from regista.report.wording import cautions

WIDTH = 96
MODEL_WIDTH = 40
# The rules are those of regista.diagnosis.verdicts.
MEANINGS = {
    "cured": "the artifacts are gone, the other patches kept their features.",
    "fewer artifacts": "at most half is left; what else “cured” takes does not hold, or could not be measured.",
    "no gain": "what was there is still there, or there was nothing to cure.",
    "changed": "at most half is left, but the other patches have other features: another model rather than a cure.",
    "mixed": "one artifact fell and another one rose.",
    "worse": "artifacts came or grew, and none fell.",
}


@dataclass(frozen=True)
class Value:
    """A cell of the table: the number, a smaller one below it, and what it is when pointed at."""

    text: str
    small: str = ""


def comparison_title(models: Sequence[ComparedEntry]) -> str:
    """How many models and what became of them: "demo-planted against 2 models: 1 cured, 1 no gain"."""
    others = [model.verdict for model in models if not model.reference]
    phrase = {"fewer artifacts": "with fewer artifacts"}
    said = [
        f"{others.count(word)} {phrase.get(word, word)}"
        for word in [*MEANINGS, *sorted({*others} - {*MEANINGS})]
        if word in others
    ]
    if len(others) == 1:
        return f"Against {models[0].entry.model}: {others[0]}"
    return f"{len(others)} models against {models[0].entry.model}: {', '.join(said)}"


def table_row(model: ComparedEntry) -> list[Value]:
    """The numbers of one model, in the order of the page's table."""
    entry = model.entry
    registers = str(entry.num_register_tokens)
    used = "" if model.effective_registers is None else f"{figure(model.effective_registers)} in use"
    low, high = (*model.cost_range, None, None)[:2]
    spread = "" if model.reference or low is None or high is None else f"{cost_text(low)} to {cost_text(high)}"
    return [
        Value(percent(entry.share)),
        Value(times(entry.ratio)),
        Value(percent(entry.number("attention_sink", "mass"))),
        _likeness(model.former),
        _likeness(model.others),
        _likeness(model.denoised_former),
        _likeness(model.denoised_others),
        Value(millions(model.parameters)),
        Value(registers, used),
        Value(figure(model.images_per_second)),
        Value(cost_text(model.cost), spread),
    ]


def limits(models: Sequence[ComparedEntry], notes: Sequence[str]) -> list[str]:
    """What limits the verdicts, a sentence each."""
    found = [*notes, *cautions(models[0].entry)]
    found += [f"Features of {model.entry.model} were not compared: {model.reason}." for model in models if model.reason]
    if all(model.denoised_others is None for model in models):
        found.append("Nothing was compared with denoised features, so whether former outlier cells recovered is open.")
    elif models[0].entry.share:
        found.append(
            "Denoised features are the reference's own, averaged over shifted views: an estimate of what a patch "
            "should say, not the truth."
        )
    if all(model.cost is None for model in models):
        found.append("Speed was not measured.")
    found.append("A verdict is about artifacts and features on these images. It is no promise about a task.")
    return found


def comparison_text(record: Mapping[str, Any]) -> str:
    """The verdicts and a table, for terminals: plain text without colours or control characters.

    Args:
        record: ``Comparison.to_dict()``, or the record of a run folder.

    Raises:
        ValueError: if it is no comparison.
    """
    models = read_compared(record.get("models") or [])
    if not models:
        raise ValueError("no comparison: the record has no models")
    lines = []
    for model in models:
        lines += _wrapped(f"{model.entry.model}: {model.verdict}: {model.sentence}", "  ")
    lines += [line for note in limits(models, record.get("notes") or []) for line in _wrapped(f"! {note}", "  ")]
    return "\n".join([*lines, "", _table(models)])


def _table(models: Sequence[ComparedEntry]) -> str:
    head = ("model", "verdict", "outliers", "norm", "sinks", "others", "former", "params", "registers", "cost")
    rows = [head, *(_text_row(model) for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _text_row(model: ComparedEntry) -> tuple[str, ...]:
    entry = model.entry
    return (
        shortened(printable(entry.model), MODEL_WIDTH),
        printable(model.verdict),
        percent(entry.share),
        times(entry.ratio),
        percent(entry.number("attention_sink", "mass")),
        NONE if model.others is None else cosine_text(model.others.mean),
        NONE if model.denoised_former is None else cosine_text(model.denoised_former.mean),
        millions(model.parameters),
        str(entry.num_register_tokens),
        cost_text(model.cost),
    )


def subtitle_words(models: Sequence[ComparedEntry], created: str) -> str:
    """Images and the day."""
    return f"{count(models[0].entry.image_count, 'image')} · {created[:10]}"


def _likeness(found: Likeness | None) -> Value:
    if found is None:
        return Value(NONE)
    return Value(cosine_text(found.mean), "" if found.p05 is None else f"5 %: {cosine_text(found.p05)}")


def _wrapped(text: str, rest: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
