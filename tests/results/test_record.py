"""Records: plain values, versions, and back again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regista.results import RunRecord
from regista.results.record import differences
from regista.results.writing import plain

RECORD = RunRecord("test", "2030-01-01T00:00:00+00:00")


class Colour(str, Enum):
    red = "r"


@dataclass
class Settings:
    size: tuple[int, int] = (2, 3)
    where: Path = Path("a/b")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (True, True),
        (np.bool_(False), False),
        (3, 3),
        (np.int64(3), 3),
        (2.5, 2.5),
        (np.float32(0.5), 0.5),
        ("ä", "ä"),
        (Path("x/y.png"), "x/y.png"),
        (Colour.red, "r"),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({2, 1}, [1, 2]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        ({1: 2, "a": {"b": ()}}, {"1": 2, "a": {"b": []}}),
        (Settings(), {"size": [2, 3], "where": "a/b"}),
        ("\udce4", "\\udce4"),
    ],
)
def test_plain(value: Any, wanted: Any) -> None:
    got = plain(value, "x", [])
    assert got == wanted
    assert type(got) is type(wanted)
    assert json.loads(json.dumps(got, allow_nan=False).encode()) == wanted


def test_numbers_json_lacks_become_null_and_are_listed() -> None:
    found: list[str] = []
    value = {"a": [1.0, float("nan"), np.float32("inf")], "b": np.array([[-np.inf]])}
    assert plain(value, "m", found) == {"a": [1.0, None, None], "b": [[None]]}
    assert found == ["m.a[1]: nan", "m.a[2]: inf", "m.b[0][0]: -inf"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, r"x\.a\[0\] is a object, which JSON cannot hold"),
        (Settings, "x is a type"),
        (b"bytes", "x is a bytes"),
        (1j, "x is a complex"),
        ({(1, 2): 3}, r"x has the key \(1, 2\)"),
    ],
)
def test_what_json_cannot_hold_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(value, "x", [])


def test_there_and_back() -> None:
    record = RECORD.updated(
        {
            "seed": 7,
            "config": Settings(),
            "metrics": {"a": np.nan},
            "models": [{"m": 1}],
            "own": {"x": (1, 2)},
            "more": None,
        }
    )
    assert record.extra == {"own": {"x": [1, 2]}, "more": None}
    text = json.dumps(record.to_dict(), allow_nan=False)
    assert RunRecord.from_dict(json.loads(text)) == record
    assert list(record.to_dict())[:2] == ["format", "schema_version"]


def test_the_list_of_nulls_follows_the_values() -> None:
    bad = RECORD.updated({"metrics": {"a": np.nan, "b": np.inf}, "own": np.nan})
    assert bad.not_finite == ["metrics.a: nan", "metrics.b: inf", "own: nan"]
    assert bad.updated({"metrics": {"a": 1.0}}).not_finite == ["own: nan"]
    assert bad.updated({"seed": 1}).not_finite == bad.not_finite
    assert RECORD.not_finite == []


@pytest.mark.parametrize("name", ["kind", "created", "schema_version", "format", "extra", "not_finite"])
def test_some_values_stay(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of a record cannot be changed"):
        RECORD.updated({name: "x"})


@pytest.mark.parametrize(
    ("name", "value"), [("metrics", [1]), ("models", {"a": 1}), ("notes", "text"), ("config", None)]
)
def test_containers_keep_their_kind(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} of a record is a"):
        RECORD.updated({name: value})
    with pytest.raises(ValueError, match=f"{name} of a record is a"):
        RunRecord.from_dict({**RECORD.to_dict(), name: value})


def test_values_of_an_older_form_are_filled_in() -> None:
    old = {"format": "regista-run", "schema_version": 0, "kind": "test", "created": "then", "lost": 1}
    record = RunRecord.from_dict(old)
    assert (record.kind, record.metrics, record.extra, record.schema_version) == ("test", {}, {"lost": 1}, 0)
    with pytest.raises(ValueError, match="lacks kind, created"):
        RunRecord.from_dict({"format": "regista-run", "schema_version": 1})
    with pytest.raises(ValueError, match="not the record of a run"):
        RunRecord.from_dict({"kind": "test", "created": "then"})


def test_differences_are_named() -> None:
    then = {"same": 1, "lr": 1e-5, "inner": {"a": [1], "b": 2}}
    assert differences(then, then) == []
    now = {"same": 1, "lr": 2e-5, "inner": {"a": [1], "b": 3}, "more": None, "new": "x"}
    assert differences(then, now) == ["lr 1e-05, now 2e-05", "inner.b 2, now 3", "new None, now 'x'"]
