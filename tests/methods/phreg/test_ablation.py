"""Studies of PH-Reg: their arms, their rows, and that finished arms stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regista.backbones.tiny import tiny_vit
from regista.cli.ablate import markdown
from regista.methods.phreg import ablation
from regista.methods.phreg.ablation import arms_of, run_study
from regista.methods.phreg.config import PhregConfig
from regista.methods.phreg.method import Phreg

CONFIG = PhregConfig(registers=2, epochs=1, num_views=2, batch_size=2, held_out=0.4, lr=1e-5)


def test_arms() -> None:
    arms = {arm.name: arm.config for arm in arms_of("ablation", CONFIG)}
    assert list(arms) == ["teacher", "denoise-only", "distil", "distil-registers", "distil-denoise", "full"]
    told = {name: (c.mode, c.registers, c.num_views) for name, c in arms.items() if c is not None}
    assert told == {
        "denoise-only": ("denoise", 2, 2),
        "distil": ("distil", 0, 1),
        "distil-registers": ("distil", 2, 1),
        "distil-denoise": ("distil", 0, 2),
        "full": ("distil", 2, 2),
    }
    counts = [arm.config.registers for arm in arms_of("registers", CONFIG) if arm.config is not None]
    assert counts == [0, 1, 4, 16]
    assert all(arm.config != CONFIG for study in ("views", "shift", "unfrozen") for arm in arms_of(study, CONFIG)[:2])
    with pytest.raises(ValueError, match="unknown study 'size'"):
        arms_of("size", CONFIG)


def test_finished_arms_stay(photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, trained = tiny_vit(image_size=(56, 56)), []
    fit = Phreg.fit

    def counted(self: Phreg, *arguments: Any, **settings: Any) -> Any:
        trained.append(self.config)
        return fit(self, *arguments, **settings)

    monkeypatch.setattr(ablation.Phreg, "fit", counted)
    monkeypatch.setattr(ablation, "arms_of", lambda what, config: arms_of(what, config)[:3])
    rows = run_study(teacher, photos, "ablation", CONFIG, tmp_path / "arms", reference=tiny_vit(seed=1))
    assert [row["arm"] for row in rows] == ["teacher", "denoise-only", "distil"]
    assert len(trained) == 2
    assert rows[0]["others_raw"] == pytest.approx(1, abs=1e-5)
    assert rows[1]["target"] > rows[0]["target"]
    assert all(-1 <= row["others_reference"] <= 1 for row in rows)
    again = run_study(teacher, photos, "ablation", CONFIG, tmp_path / "arms", reference=tiny_vit(seed=1))
    assert len(trained) == 2
    assert again == rows
    table = markdown(rows).splitlines()
    assert len(table) == 2 + len(rows)
    assert "cosine to denoised" in table[0]
    assert "outliers" not in table[0].split("|")  # a healthy model has none to count


def test_studies_share_their_arms(photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, trained = tiny_vit(image_size=(56, 56)), []
    fit = Phreg.fit

    def counted(self: Phreg, *arguments: Any, **settings: Any) -> Any:
        trained.append(self.config)
        return fit(self, *arguments, **settings)

    monkeypatch.setattr(ablation.Phreg, "fit", counted)
    ablated = run_study(teacher, photos, "ablation", CONFIG, tmp_path)
    assert len(trained) == 5
    swept = run_study(teacher, photos, "registers", CONFIG, tmp_path)
    assert len(trained) == 5 + 3  # without registers it is the ablation's arm
    ours, theirs = ({row["arm"]: row for row in rows} for rows in (swept, ablated))
    assert {**ours["registers-0"], "arm": ""} == {**theirs["distil-denoise"], "arm": ""}
    assert ours["registers-0"]["arm"] == "registers-0"


@pytest.mark.parametrize(("change", "message"), [
    ({"lr": 2e-5}, r"full was run otherwise \(config.lr 1e-05, now 2e-05\)"),
    ({"seed": 1}, "judged"),
    ({}, "teacher"),
])  # fmt: skip
def test_arms_of_another_run_are_refused(
    photos: list[Path], tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "arms_of", lambda what, config: arms_of(what, config)[-1:])
    run_study(tiny_vit(image_size=(56, 56)), photos, "ablation", CONFIG, tmp_path)
    model = tiny_vit(image_size=(56, 56), seed=0 if change else 1)
    with pytest.raises(ValueError, match=message):
        run_study(model, photos, "ablation", replace(CONFIG, **change), tmp_path)
