"""Sentences against numbers chosen by hand, and entries in which anything may be missing or odd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from regista.report import tables
from regista.report.advice import advise
from regista.report.entry import ModelEntry, read_entry
from regista.report.text import summary_table, summary_text
from regista.report.wording import cautions, checks, claim, last_outlier_block, planted_sentence
from tests.report.run_folders import FakeModel, contents


def entry(model: FakeModel | None = None, **changes: Any) -> ModelEntry:
    record = contents(model or FakeModel(outliers=5.0))[0]
    measures = {**record["measures"], **changes.pop("measures", {})}
    return read_entry({**record, "measures": measures, **changes})


def with_high(**numbers: Any) -> dict[str, Any]:
    record = contents(FakeModel(outliers=5.0))[0]
    return {"high_norm": {**record["measures"]["high_norm"], **numbers}}


def test_outliers_in_one_sentence() -> None:
    found = entry(
        share=0.021, onset_block=4, outlier_block=5, measures=with_high(ratio=5.84, share=[0, 0, 0, 0, 0.02, 0.021])
    )
    assert claim(found) == (
        "2.1 % of patch tokens have outlier norms (5.8x the median) from block 4 on; they move with the image"
    )
    fixed = entry(share=0.021, onset_block=4, fixed_place="fixed", measures=with_high(ratio=None))
    assert claim(fixed).endswith("outlier norms from block 4 on; they sit at the same places in every image")


def test_outliers_in_the_middle_only() -> None:
    shares = [0, 0, 0.02, 0.021, 0, 0]
    found = entry(share=0.021, onset_block=2, outlier_block=3, measures=with_high(ratio=9.0, share=shares))
    assert last_outlier_block(found) == 3
    assert "(9.0x the median at block 3) from block 2 to 3, not after" in claim(found)
    assert any("The final features have none" in words for words in advise(found).meaning)
    single = entry(share=0.021, onset_block=3, outlier_block=3, measures=with_high(share=[0, 0, 0, 0.021, 0, 0]))
    assert " at block 3, not after" in claim(single)


def test_other_kinds() -> None:
    sink = {"found": True, "share": 0.004, "mass": 0.31, "block": 9, "strongest": 88.0}
    found = entry(kinds=["attention-sink", "lazy"], measures={"attention_sink": sink})
    assert claim(found) == "0.4 % of patch tokens draw 31 % of all attention (block 9); also: lazy aggregation"
    found = entry(kinds=["positional"], measures={"positional": {"variance_explained": 0.62}})
    assert claim(found).startswith("position alone explains 62 % of the variance")
    found = entry(kinds=["inconsistent"], measures={"inconsistent": {"share": 0.013}})
    assert claim(found).startswith("1.3 % of patch features change")
    found = entry(kinds=["lazy"], measures={"lazy": {"hit_ratio": 0.2, "chance": 0.35}})
    assert "on an object in 20 % of images (a random patch: 35 %)" in claim(found)
    assert claim(entry(kinds=["new-kind"])) == "found"
    assert [check.state for check in checks(entry(kinds=["new-kind"]))][-1] == "found"


def test_clean_says_what_was_looked_for() -> None:
    clean = entry(FakeModel(images=4))
    assert claim(clean) == "none of the 3 kinds of artifact that were looked for was found in 4 images"
    states = {check.kind: check.state for check in checks(clean)}
    assert states == {
        "high-norm": "absent",
        "attention-sink": "absent",
        "positional": "absent",
        "inconsistent": "unknown",
        "lazy": "unknown",
    }
    one = entry(FakeModel(), measures={"attention_sink": None, "positional": None})
    assert claim(one) == "the one kind of artifact that was looked for was not found in 3 images"
    assert "Not looked at here: inconsistent patches, lazy aggregation" in advise(clean).next_steps[0]


def test_registers_are_never_assumed_to_help() -> None:
    assert any(
        "measured, not assumed to help: 3.20 of them" in words
        for words in advise(entry(FakeModel(registers=4))).meaning
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"share": 0.101}, "more than a tenth"),
        ({"images": {"count": 1}}, "One image only"),
        ({"images": {"count": 9}}, "Only 9 images"),
        (
            {"images": {"count": 40, "skipped": [["a.png", "empty"], ["b.png", "cut short"]]}},
            "2 images could not be used: a.png",
        ),
    ],
)
def test_cautions(changes: dict[str, Any], wanted: str) -> None:
    assert any(wanted in caution for caution in cautions(entry(**changes)))


def test_no_caution_without_a_reason() -> None:
    assert cautions(entry(share=0.1, images={"count": 10})) == []
    assert "by hand" in cautions(entry(share=0.1, images={"count": 10}), cutoff_by_hand=True)[0]
    many = [[f"{index}.png", "empty"] for index in range(30)]
    assert "and 22 more" in cautions(entry(images={"count": 40, "skipped": many}))[0]


def test_planted_sentence() -> None:
    assert planted_sentence(entry()) == ""
    found = planted_sentence(entry(planted={"block": 4, "kind": "position", "precision": 0.5, "recall": 0.25}))
    assert "on purpose (at fixed places of the grid), at block 4" in found
    assert "50 % was planted (precision)" in found
    assert "25 % was found (recall)" in found
    assert planted_sentence(entry(planted={})).endswith("on purpose.")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in inside:
        yield from leaves(item, (*path, key))


@pytest.mark.parametrize("odd", [None, "text", -3, 1e300, True, [], {}, [None, "x", {}], {"a": [1]}], ids=repr)
def test_any_value_may_be_odd(odd: Any) -> None:
    """Files may be old, edited or foreign: a word too few, never a crash that is no ValueError."""
    record = contents(FakeModel(outliers=5.0, planted=True, registers=2))[0]
    tried = 0
    for path in leaves(record):
        changed = copy.deepcopy(record)
        if not path:
            changed = odd
        else:
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
        try:
            read = read_entry(changed)
        except ValueError:
            assert path in ((), ("model",), ("verdict",))
            continue
        said = [claim(read), *cautions(read), planted_sentence(read), *(check.sentence for check in checks(read))]
        said += [*advise(read).meaning, *advise(read).next_steps, summary_text(changed), summary_table([changed])]
        said += [line.value for _, lines in tables.all_numbers(read) for line in lines]
        assert all(isinstance(words, str) and words != "nan" for words in said)
        for table in (tables.by_block(read), tables.register_table(read), tables.comparison([read])):
            assert table is None or all(len(row) == len(table.head) for row in table.rows)
        tried += 1
    assert tried > 50
