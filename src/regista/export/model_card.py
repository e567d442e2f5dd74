"""Model cards: README.md as the Hugging Face hub reads it, of what is known and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from regista.results.writing import plain

TAGS = ("vision-transformer", "registers", "image-feature-extraction", "regista")
LIBRARY_NAMES = {"timm": "timm", "transformers": "transformers", "regista": "regista", "onnx": "onnx"}


@dataclass(frozen=True)
class ModelCard:
    """What a card says; what is empty is left out.

    Attributes:
        title: The heading.
        summary: What the model is, in a sentence or two.
        method: The name of what was done to the model ("phreg", "test_time" ...).
        config: The method's settings.
        records: Numbers before and after, one row each, such as {"task": "segmentation", "metric": "mIoU",
            "before": 0.41, "after": 0.44}. Columns are the keys in the order they come.
        base_model: Of the hub, "org/name".
        license: As the hub writes it ("apache-2.0").
        tags: Besides the usual ones.
    """

    title: str = ""
    summary: str = ""
    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    base_model: str = ""
    license: str = ""
    tags: Sequence[str] = ()

    @classmethod
    def of(cls, card: ModelCard | Mapping[str, Any]) -> ModelCard:
        """A card from a plain dictionary.

        Raises:
            ValueError: for a key that a card has not.
        """
        if isinstance(card, ModelCard):
            return card
        unknown = sorted(set(card) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"a model card has no {unknown}; it has {', '.join(cls.__dataclass_fields__)}")
        return cls(**card)


def card_text(
    card: ModelCard | Mapping[str, Any], *, library: str, snippet: str = "", notes: Sequence[str] = ()
) -> str:
    """The text of README.md.

    Args:
        library: The format of the folder: "timm", "transformers", "regista" or "onnx".
        snippet: Code that loads the model.
        notes: What the conversion had to say.

    Raises:
        ValueError: for another library, an unknown key, records that are not dictionaries of plain values, and NaN or
            infinite numbers.
    """
    if library not in LIBRARY_NAMES:
        raise ValueError(f"library is one of {', '.join(LIBRARY_NAMES)}, got {library!r}")
    card = ModelCard.of(card)
    parts = [_front_matter(card, library), f"# {card.title or 'Vision Transformer with registers'}", card.summary]
    if card.method:
        parts += ["## Method", f"`{card.method}`, applied with [Regista](https://pypi.org/project/regista/)."]
    if card.config:
        settings = json.dumps(_plain(dict(card.config), "config"), indent=2, ensure_ascii=False)
        parts += ["### Settings", f"```json\n{settings}\n```"]
    if card.records:
        parts += ["## Results", _table(card.records)]
    if snippet:
        parts += ["## Loading", f"```python\n{snippet.strip()}\n```"]
    if notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(card: ModelCard, library: str) -> str:
    content: dict[str, Any] = {"library_name": LIBRARY_NAMES[library], "pipeline_tag": "image-feature-extraction"}
    content["tags"] = list(dict.fromkeys([*TAGS, *([card.method] if card.method else []), *card.tags]))
    content |= {key: value for key in ("base_model", "license") if (value := getattr(card, key))}
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---"


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise ValueError(f"record {number} is a {type(record).__name__}, wanted a dictionary of plain values")
        rows.append(_plain(dict(record), f"records[{number}]"))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _plain(value: Any, where: str) -> Any:
    not_finite: list[str] = []
    found = plain(value, where, not_finite)
    if not_finite:
        raise ValueError(f"a model card holds no NaN or infinite numbers, got {', '.join(not_finite)}")
    return found
