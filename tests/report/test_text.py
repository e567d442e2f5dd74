"""The verdict for terminals."""

from __future__ import annotations

from typing import Any

import pytest

from regista.report.formatting import count, figure, file_name, percent, shortened, times
from regista.report.text import WIDTH, summary_table, summary_text
from tests.report.run_folders import FakeModel, contents


def record(model: FakeModel, **changes: Any) -> dict[str, Any]:
    return {**contents(model)[0], **changes}


def test_summary() -> None:
    text = summary_text(
        record(FakeModel("demo-planted", outliers=5.0, planted=True), summary=["2.1% have outlier norms."])
    )
    lines = text.splitlines()
    assert lines[0] == "demo-planted: artifacts (high-norm)"
    assert lines[1] == "  - 2.1% have outlier norms."
    assert lines[2].startswith("  ! Planted model")
    assert "Caution: Only 3 images" in text
    assert all(len(line) <= WIDTH for line in lines)


def test_summary_without_sentences_makes_its_own() -> None:
    text = summary_text(record(FakeModel("demo"), summary=[]))
    assert text.startswith("demo: clean\n  - none of the 3 kinds")


def test_no_control_characters() -> None:
    names = {"images": {"count": 1, "skipped": [["\x1b[31mred\nline\r\x07.png", "empty"]]}}
    text = summary_text(record(FakeModel("\x1b]0;title\x07"), summary=["\x1b[2J"], **names))
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)
    assert "\x1b" not in summary_table([record(FakeModel("\x1b[31m"))])
    assert "[31mred?line" in text


def test_table_lines_up() -> None:
    records = [
        record(FakeModel("a")),
        record(FakeModel("much-longer-name", outliers=5.0, planted=True)),
        record(FakeModel("x" * 200)),
    ]
    lines = summary_table(records).splitlines()
    assert len(lines) == 5
    start = lines[0].index("verdict")
    assert [line[start:].split()[0] for line in lines[2:]] == ["clean", "artifacts", "clean"]
    assert "much-longer-name (planted)" in lines[3]
    assert max(map(len, lines)) < 140


def test_no_entry() -> None:
    for wrong in ({}, {"model": "a"}, []):
        with pytest.raises(ValueError, match="regista diagnose"):
            summary_text(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.0213, "2.1 %"),
        (0.02, "2 %"),
        (0.00004, "under 0.01 %"),
        (0.0004, "0.04 %"),
        (0.0999, "10 %"),
        (0.5, "50 %"),
        (1.0, "100 %"),
    ],
)
def test_percent(share: float | None, wanted: str) -> None:
    assert percent(share) == wanted


def test_numbers() -> None:
    values = (None, 0.0, 297.41, 5.8231, 0.0123, 12345.6, 2e-7, -0.5, 3e9)
    wanted = ["–", "0", "297", "5.82", "0.0123", "12,346", "2.00e-07", "-0.500", "3.00e+09"]
    assert [figure(value) for value in values] == wanted
    assert [times(value) for value in (None, 5.84, 291.2, 1234.0)] == ["–", "5.8x", "291x", "1,234x"]
    assert [count(1, "image"), count(0, "image"), count(1200, "image")] == ["1 image", "0 images", "1,200 images"]


def test_names() -> None:
    assert file_name("a/b/c.jpg") == file_name("a\\b\\c.jpg") == "c.jpg"
    assert file_name("") == ""
    assert shortened("short", 10) == "short"
    assert shortened("run/checkpoint-1000.pth", 9) == "…1000.pth"
