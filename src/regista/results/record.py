"""The record of a run: what was asked for, with what, and what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from regista.results.writing import in_words, plain

SCHEMA_VERSION = 1
FORMAT = "regista-run"


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` holds. All values are such as JSON has.

    Attributes:
        kind: What made the run: "diagnosis", "demo", "training" ...
        created: When, ISO 8601 in UTC.
        command: The command line.
        config: All settings, resolved.
        seed: Of the random numbers, or None if there are none.
        versions: {library: version or None}.
        commit: Git commit of this package's source, or None.
        weights_hash: Of the weights looked at, see ``weights_hash``; or None.
        metrics: {name: number}.
        pictures: {name: file, relative to the run folder}.
        skipped: [[file, reason], ...] of input that could not be read.
        notes: What else a reader should know.
        models: One entry a model, for kinds that look at several.
        extra: Everything else; its keys lie beside the others in the file.
        not_finite: "metrics.loss: nan" for every number that was NaN or infinite: those are
            stored as null, since JSON has no such numbers.
        schema_version: Of this form.
    """

    kind: str
    created: str
    command: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: str | None = None
    weights_hash: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    skipped: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def __getitem__(self, key: str) -> Any:
        """A value by its name in the file."""
        return self.to_dict()[key]

    def get(self, key: str, default: Any = None) -> Any:
        """A value by its name in the file, or ``default``."""
        return self.to_dict().get(key, default)

    def updated(self, changes: Mapping[str, Any]) -> RunRecord:
        """A copy with other values, made plain; names that are no attribute go to ``extra``.

        Raises:
            ValueError: for a value that JSON cannot hold, or a name that is not to be changed.
        """
        fixed = sorted({"kind", "created", "schema_version", "not_finite", "extra", "format"} & set(changes))
        if fixed:
            raise ValueError(f"{', '.join(fixed)} of a record cannot be changed")
        bad = [entry for entry in self.not_finite if re.split(r"[.:\[]", entry)[0] not in changes]
        clean: dict[str, Any] = {name: plain(value, name, bad) for name, value in changes.items()}
        known = {name: clean.pop(name) for name in list(clean) if name in _NAMES}
        _check_types(known)
        return replace(self, **known, extra={**self.extra, **clean}, not_finite=bad)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        named = {name: getattr(self, name) for name in _NAMES if name != "extra"}
        return {"format": FORMAT, "schema_version": self.schema_version, **named, **self.extra}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: if the form is newer than this version reads, or is no record.
        """
        version = values.get("schema_version")
        if values.get("format") != FORMAT or not isinstance(version, int):
            raise ValueError(f"not the record of a run (no format {FORMAT!r} with a schema_version)")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"the record has schema version {version}, this regista reads up to {SCHEMA_VERSION}; update regista"
            )
        known = {name: values[name] for name in _NAMES if name in values and name != "extra"}
        missing = [name for name in ("kind", "created") if name not in known]
        if missing:
            raise ValueError(f"the record lacks {', '.join(missing)}")
        _check_types(known)
        extra = {name: value for name, value in values.items() if name not in {*known, "format"}}
        return cls(**known, extra=extra)


_NAMES = tuple(item.name for item in fields(RunRecord))
_TYPES = {"list": list, "dict": dict, "str": str}


def read_record(path: Path) -> RunRecord:
    """Read ``run.json``.

    Raises:
        ValueError: naming the file, if it cannot be read, is no JSON or no record, or is newer.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {in_words(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the record is damaged, not valid JSON ({error})") from error
    try:
        return RunRecord.from_dict(values if isinstance(values, dict) else {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def differences(then: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What is not the same, name by name, in words: ["config.lr 1e-05, now 2e-05"].

    Args:
        then, now: Plain values; those that are mappings are compared inside.
        within: Put before the names.
    """
    found: list[str] = []
    for name, value in now.items():
        before = then.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            found += differences(before, value, f"{within}{name}.")
        elif before != value:
            found.append(f"{within}{name} {before!r}, now {value!r}")
    return found


def _check_types(values: Mapping[str, Any]) -> None:
    """Lists are lists and dicts dicts, so that readers need not look."""
    for item in fields(RunRecord):
        wanted = _TYPES.get(str(item.type).split("[")[0])
        if item.name in values and wanted is not None and not isinstance(values[item.name], wanted):
            got = type(values[item.name]).__name__
            raise ValueError(f"{item.name} of a record is a {wanted.__name__}, got a {got}")
