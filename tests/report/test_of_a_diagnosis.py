"""What a diagnosis really writes makes a page: format and reader cannot drift apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regista.backbones.tiny import tiny_vit
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose
from regista.report.html import write_report
from regista.report.reading import SHAPES, open_run
from regista.report.text import summary_table, summary_text
from tests.report.page import Page

SKETCHED = set(SHAPES) - {"planted_masks"}


@pytest.mark.parametrize(("registers", "cls"), [(0, True), (2, True), (3, False)])
def test_page_of_a_diagnosis(tmp_path: Path, registers: int, cls: bool) -> None:
    backbone = tiny_vit(num_register_tokens=registers, class_token=cls)
    images = torch.rand(3, 3, 84, 70)
    config = DiagnosisConfig(batch_size=2, consistency=True)
    result = diagnose(backbone, images, config=config)
    path = result.save(tmp_path / "run")
    run = open_run(path)
    assert set(run.arrays(run.entries[0])) == SKETCHED
    (entry,) = run.entries
    assert entry.num_register_tokens == registers
    assert (entry.depth, entry.grid_size, entry.image_count) == (4, (6, 5), 3)
    assert len(entry.curves.median) == len(entry.curves.share) == 4
    page = Page(write_report(path).read_text(encoding="utf-8"))
    assert page.loads == page.wrong == page.open_tags == []
    assert "None" not in page.text
    assert {"Patch score", "Consistency", "Attention received"} <= set(words(page))
    assert ("Attention: CLS" if cls else "Attention: mean over queries") in words(page)
    assert [f"Attention: register {index}" in words(page) for index in range(registers)] == [True] * registers
    assert all(sentence in page.text for sentence in result.summary)
    text = summary_text(result.to_dict())
    assert result.verdict in text.splitlines()[0]
    assert summary_table([result.to_dict()]).count("\n") == 2


def words(page: Page) -> list[str]:
    return [part.strip() for part in page.parts]
