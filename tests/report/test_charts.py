"""Charts show their numbers, and lie in a page without disturbing it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from regista.report.charts import chart
from regista.report.entry import read_entry
from regista.report.figures import (
    attention_chart,
    checkpoint_labels,
    histogram_chart,
    onset_chart,
    series_chart,
    series_words,
)
from regista.report.formatting import percent
from tests.report.page import Page
from tests.report.run_folders import FakeModel, contents

SICK = FakeModel(outliers=6.0, registers=2)


def drawn(model: FakeModel, which: Any) -> Page:
    record, arrays = contents(model)
    return Page(which(read_entry(record), arrays, "name"))


def test_onset_chart_marks_the_block() -> None:
    assert "onset: block 2" in drawn(SICK, onset_chart).text
    planted = drawn(FakeModel(outliers=6.0, planted=True), onset_chart).text
    assert "planted and found: block 2" in planted
    assert "onset" not in planted
    assert "onset" not in drawn(FakeModel(), onset_chart).text


def test_onset_chart_marks_a_planted_block_that_was_missed() -> None:
    record, arrays = contents(FakeModel(outliers=6.0, planted=True))
    svg = onset_chart(read_entry({**record, "onset_block": 3}), arrays, "name")
    assert "planted: block 2" in svg
    assert "onset: block 3" in svg


def test_onset_chart_draws_the_medians() -> None:
    """Points of the median line, read back from the picture, are the logarithms of the medians."""
    record, arrays = contents(FakeModel())
    svg = onset_chart(read_entry(record), arrays, "name")
    line = next(
        path for path in re.findall(r'<path d="([^"]+)"[^>]*stroke: var\(--middle\)', svg) if path.count("L") == 5
    )
    points = np.array(re.findall(r"([\d.]+) ([\d.]+)", line), dtype=float)
    medians = np.log(record["measures"]["high_norm"]["median"])
    assert np.corrcoef(points[:, 1], medians)[0, 1] == pytest.approx(-1, abs=1e-9)  # y goes down
    assert np.corrcoef(points[:, 0], np.arange(6))[0, 1] == pytest.approx(1, abs=1e-9)


def test_histogram_shows_the_cutoff() -> None:
    record, arrays = contents(SICK)
    page = drawn(SICK, histogram_chart)
    assert f"cutoff {record['cutoff']:.0f}" in page.text
    assert "outliers" in page.text
    assert "after block 5" in page.text
    svg = histogram_chart(read_entry(record), arrays, "name")
    counts = arrays["histogram_counts"][5]
    high = np.sqrt(arrays["histogram_edges"][1:] * arrays["histogram_edges"][:-1]) > record["cutoff"]
    for colour, part in (("middle", ~high), ("bad", high)):
        wanted = int(((counts > 0) & part).sum())
        assert wanted > 0
        assert svg.count(f"fill: var(--{colour})") == wanted + 1  # and one in the legend
    assert "cutoff" not in drawn(FakeModel(), histogram_chart).text


def test_charts_without_numbers_are_left_out() -> None:
    record, _ = contents(SICK)
    empty = read_entry({**record, "measures": {}})
    assert onset_chart(empty, {}, "a") is None
    assert histogram_chart(empty, {}, "a") is None
    assert attention_chart(empty, "a") is None
    assert series_chart([empty], "a") is None


def test_attention_chart_names_who_receives() -> None:
    text = drawn(SICK, lambda entry, _, name: attention_chart(entry, name)).text
    assert "CLS" in text
    assert "registers" in text
    assert "patch sinks" in text


def test_series() -> None:
    entries = [
        read_entry(contents(FakeModel(f"timm/a@run/{step}.pth", outliers=high))[0])
        for step, high in ((1, None), (2, 4.0))
    ]
    assert checkpoint_labels(entries) == ["1.pth", "2.pth"]
    assert series_words(entries) == "Outliers first appear at 2.pth."
    assert series_words(entries[:1]) == "No checkpoint has outliers."
    assert f"1.pth: 0 %, 2.pth: {percent(entries[1].share)}" in series_chart(entries, "a")
    same = [read_entry(contents(FakeModel(f"timm/a@{folder}/last.pth"))[0]) for folder in "xy"]
    assert checkpoint_labels(same) == ["x/last.pth", "y/last.pth"]


def test_inline_svg_is_clean() -> None:
    def draw(axes: list[Any]) -> None:
        axes[0].plot([0, 1], [0, 1], label="<script>&$x$", marker="o")
        axes[0].pcolormesh([0, 1], [0, 1], [[1.0]], rasterized=True)
        axes[0].legend()

    svg = chart(draw, name="own", description='a "quoted" <b>')
    assert isinstance(svg, Markup)
    assert svg == chart(draw, name="own", description='a "quoted" <b>')
    assert "http" not in svg
    assert "#00000" not in svg
    page = Page(svg)
    assert page.loads == []
    assert page.wrong == []
    assert {"script", "metadata", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert "<script>&$x$" in page.text
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert names
    assert all(name.startswith("own-") for name in names)
    used = re.findall(r'(?:url\(|href=")#([^")]+)', svg)
    assert used
    assert set(used) <= set(names)
