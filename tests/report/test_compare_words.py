"""A comparison on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from regista.report.compare_entry import read_compared
from regista.report.compare_words import comparison_text, comparison_title, limits, table_row
from regista.report.formatting import cosine_text, cost_text, millions
from regista.results import RunFolder
from tests.report.compared_runs import CURED, SAME, SICK, compared, make_comparison


def record(path: Path, *verdicts: str) -> dict[str, object]:
    models = [SICK, CURED, SAME, SAME, SAME][: len(verdicts)]
    pairs = [(model, compared(verdict)) for model, verdict in zip(models, verdicts, strict=True)]
    return RunFolder.open(make_comparison(path / "run", *pairs)).record.to_dict()


def test_text_says_every_verdict_and_the_numbers(tmp_path: Path) -> None:
    text = comparison_text(record(tmp_path, "reference", "cured", "no gain"))
    lines = text.splitlines()
    assert lines[0] == "sick: reference: outliers 3.0 % -> 0.0 % of reference"
    assert lines[1].startswith("cured-model: cured: ")
    assert "! Only 3 images" in text
    table = lines[-5:]
    assert " ".join(table[0].split()) == "model verdict outliers norm sinks others former params registers cost"
    assert " ".join(table[3].split()) == "cured-model cured 0 % – 1.2 % 0.988 0.765 22.1 M 4 1.03x"
    assert max(map(len, lines[:-5])) <= 96
    assert text.isprintable() or set(filter(lambda letter: not letter.isprintable(), text)) == {"\n"}


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    entry = record(tmp_path, "reference", "cured")
    models = entry["models"]
    assert isinstance(models, list)
    models[1]["comparison"]["sentence"] = "\x1b[2Jgone"
    assert "\x1b" not in comparison_text(entry)


@pytest.mark.parametrize(
    ("verdicts", "title"),
    [
        (["cured"], "Against sick: cured"),
        (["no gain", "cured", "cured"], "3 models against sick: 2 cured, 1 no gain"),
        (["fewer artifacts", "worse"], "2 models against sick: 1 with fewer artifacts, 1 worse"),
        (["odd", "cured"], "2 models against sick: 1 cured, 1 odd"),
    ],
)
def test_title(tmp_path: Path, verdicts: list[str], title: str) -> None:
    models = record(tmp_path, "reference", *verdicts)["models"]
    assert comparison_title(read_compared(models)) == title  # type: ignore[arg-type]


def test_limits_depend_on_what_was_measured(tmp_path: Path) -> None:
    pairs = [(SICK, compared("reference")), (CURED, compared("cured"))]
    models = read_compared(RunFolder.open(make_comparison(tmp_path / "a", *pairs)).record.models)
    said = " ".join(limits(models, ["A note."]))
    assert "A note." in said
    assert "averaged over shifted views" in said
    assert "Speed was not measured" not in said
    bare = {"to_denoised": None, "throughput": None}
    pairs = [(SICK, compared("reference", **bare)), (CURED, compared("cured", **bare))]
    models = read_compared(RunFolder.open(make_comparison(tmp_path / "b", *pairs)).record.models)
    said = " ".join(limits(models, []))
    assert "Nothing was compared with denoised features" in said
    assert "Speed was not measured." in said
    assert [value.text for value in table_row(models[1])].count("–") == 5


def test_damaged_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no comparison"):
        comparison_text({"models": []})
    entry = record(tmp_path, "reference", "cured")
    models = entry["models"]
    assert isinstance(models, list)
    models[1]["comparison"] = {"verdict": "cured", "to_reference": "?", "throughput": 3, "parameters": "many"}
    assert "cured-model: cured" in comparison_text(entry)


@pytest.mark.parametrize(
    ("rounds", "noise"), [([0.98, 1.03], True), ([1.01, 1.05], False), ([0.7, 0.9], False), ([], False), ("?", False)]
)
def test_noise_is_a_cost_on_both_sides_of_one(tmp_path: Path, rounds: object, noise: bool) -> None:
    entry = record(tmp_path, "reference", "cured")
    models = entry["models"]
    assert isinstance(models, list)
    models[1]["comparison"]["throughput"]["cost_range"] = rounds
    assert read_compared(models)[1].cost_is_noise is noise


def test_numbers_as_people_read_them() -> None:
    assert [cosine_text(value) for value in (None, 0.99834, -0.02)] == ["–", "0.998", "-0.020"]
    assert [cost_text(value) for value in (None, 1.0312, 0.5)] == ["–", "1.03x", "0.50x"]
    assert [millions(value) for value in (None, 241_984, 22_053_504, 632e6)] == ["–", "241,984", "22.1 M", "632 M"]
