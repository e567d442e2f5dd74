"""Model cards say what was handed in, in the form the hub reads, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from regista.export.model_card import TAGS, ModelCard, card_text


def parts(text: str) -> tuple[dict[str, Any], str]:
    assert text.startswith("---\n")
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(front), body


def table(body: str) -> list[list[str]]:
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_full_card() -> None:
    records = [
        {"task": "segmentation", "metric": "mIoU", "before": 0.41, "after": 0.4437},
        {"task": "a|b", "before": 7, "after": None, "unit": "px"},
    ]
    card = ModelCard(
        title="ViT-S/14",
        summary="Cleaned.",
        method="phreg",
        config={"num_views": 10, "size": (1, 2)},
        records=records,
        base_model="facebook/dinov2-small",
        license="apache-2.0",
        tags=["dinov2", "registers"],
    )
    front, body = parts(card_text(card, library="timm", snippet="import timm\n", notes=["no CLS"]))
    assert front["library_name"] == "timm"
    assert front["base_model"] == "facebook/dinov2-small"
    assert front["license"] == "apache-2.0"
    assert front["tags"] == [*TAGS, "phreg", "dinov2"]
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert headings == ["# ViT-S/14", "## Method", "### Settings", "## Results", "## Loading", "## Notes"]
    assert '"num_views": 10' in body
    assert "```python\nimport timm\n```" in body
    assert table(body) == [
        ["task", "metric", "before", "after", "unit"],
        ["---"] * 5,
        ["segmentation", "mIoU", "0.41", "0.4437", ""],
        ["a\\|b", "", "7", "", "px"],
    ]


def test_what_is_not_known_is_absent() -> None:
    front, body = parts(card_text({}, library="onnx"))
    assert set(front) == {"library_name", "pipeline_tag", "tags"}
    assert [line for line in body.splitlines() if line.startswith("#")] == ["# Vision Transformer with registers"]
    assert "|" not in body
    assert "None" not in body


def test_text_cannot_break_out_of_the_front_matter() -> None:
    front, body = parts(card_text({"license": "x\n---\nlibrary_name: y", "title": "T"}, library="timm"))
    assert front["library_name"] == "timm"
    assert front["license"].startswith("x")
    assert body.lstrip().startswith("# T")


@pytest.mark.parametrize(
    ("card", "wanted"),
    [
        ({"licence": "mit"}, r"no \['licence'\]; it has title"),
        ({"records": [3]}, "record 0 is a int"),
        ({"records": [{"after": float("nan")}]}, r"no NaN .* records\[0\]\.after"),
        ({"config": {"x": object()}}, r"config\.x is a object"),
    ],
)
def test_mistakes_are_named(card: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        card_text(card, library="timm")
    with pytest.raises(ValueError, match="library is one of"):
        card_text({}, library="flax")
