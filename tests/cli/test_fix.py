"""``regista fix`` and ``regista ablate`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import regista
from regista.backbones.weights import weights_hash
from regista.cli.main import main


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(6):
        Image.fromarray(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)).resize((150, 112)).save(
            folder / f"{index}.png"
        )
    return folder


def run(capsys: Any, *words: object) -> tuple[str, str, int]:
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return captured.out, captured.err, code


def test_a_cure_from_end_to_end(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    text, _, code = run(capsys, "fix", "tiny-planted", "test-time", photos, "-o", out, "-q")
    assert code == 0
    assert "artifacts -> clean" in text
    assert "regista.load(" in text
    cured = regista.load(out / "model")
    assert cured.num_register_tokens == 1
    assert [entry["method"] for entry in cured.history] == ["test_time"]
    record = json.loads((out / "run.json").read_text())
    assert record["kind"] == "fix"
    assert record["before_after"][0] == {"measure": "verdict (norms)", "before": "artifacts", "after": "clean"}
    assert "| outlier share |" in (out / "model" / "README.md").read_text()
    _, error, code = run(capsys, "fix", "tiny-planted", "test-time", photos, "-o", out, "-q")
    assert code == 1
    assert "--force" in error
    assert run(capsys, "fix", "tiny-planted", "test-time", photos, "-o", out, "-q", "--force")[2] == 0


def test_registers_for_timm(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    text, _, code = run(capsys, "fix", "tiny", "trained", "--registers", 4, "-o", out, "--json")
    assert code == 0
    assert json.loads(text)["export_format"] == "timm"
    module: Any = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True)
    assert module.reg_token.shape == (1, 4, 64)
    again = regista.load(out / "model")
    assert torch.equal(again.module.reg_token, module.reg_token)


def test_settings_come_from_file_and_words(photos: Path, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "fix.yaml"
    config.write_text("top_k: 3\nvariant: released\n")
    words = (
        "fix",
        "tiny-planted",
        "test_time",
        photos,
        "top_k=2",
        "--config",
        config,
        "-o",
        tmp_path / "run",
        "--json",
    )
    text, error, _ = run(capsys, *words)
    assert not error
    settings = json.loads(text)["history"][0]["config"]
    assert (settings["top_k"], settings["variant"]) == (2, "released")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "testtime"), "did you mean 'test_time'?"),
        (("tiny", "test_time"), "needs images"),
        (("tiny", "test_time", "PHOTOS", "top_q=1"), "no setting 'top_q' (did you mean 'top_k'?)"),
        (("tiny", "test_time", "PHOTOS", "top_k=few"), "top_k wants a whole number or None"),
        (("tiny", "trained", "--batch-size", "3"), "has no setting 'batch_size'"),
        (("tiny", "test_time", "PHOTOS"), "shows no outlier tokens"),
        (("tiny", "trained", "--config", "missing.yaml"), "settings (missing.yaml): No such file or directory"),
        (("tiny-planted", "test_time", "PHOTOS", "--format", "timm"), "--format regista"),
        (("tiny", "phreg", "PHOTOS", "unfrozen=nonsense"), "unfrozen: unknown ['nonsense']"),
        (("tiny", "phreg", "PHOTOS", "mode=denoise", "--registers", "4"), "no use for registers beside mode=denoise"),
        (("tinny", "trained"), "unknown model 'tinny'"),
        (("tiny", "trained", "--resume"), "--resume needs the folder of the run"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, photos: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(photos) if word == "PHOTOS" else word for word in words]
    _, error, code = run(capsys, "fix", *given)
    assert code == 1
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "runs/fix-001").exists()  # free for the next try


SHORT = ("epochs=1", "num_views=2", "batch_size=3", "held_out=0.4", "lr=1e-5", "image_size=56", "--registers", 2)


def test_a_run_goes_on_only_as_it_was_begun(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    text, _, code = run(capsys, "fix", "tiny", "phreg", photos, *SHORT, "-o", out, "-q")
    assert code == 0
    assert "held-out cosine to the target" in text
    record, model = (out / "run.json").read_bytes(), (out / "model/model.safetensors").read_bytes()
    for words, differing in (
        (("tiny", "trained"), "method 'phreg', now 'trained'"),
        (("tiny", "phreg", photos, *SHORT, "--seed", 1), "config.seed 0, now 1"),
        (("tiny", "phreg", photos / "0.png", photos / "1.png", *SHORT), "images "),
        (("tiny-planted", "phreg", photos, *SHORT), "model "),
    ):
        _, error, code = run(capsys, "fix", *words, "-o", out, "--resume")
        assert code == 1
        assert "was run otherwise" in error
        assert differing in error
    again, error, code = run(capsys, "fix", "tiny", "phreg", photos, *SHORT, "-o", out, "--resume")
    assert code == 0
    assert again == text
    assert "is finished; nothing is left to do" in error
    assert (out / "run.json").read_bytes() == record
    assert (out / "model/model.safetensors").read_bytes() == model


def test_resume_in_a_new_folder_says_that_it_begins(photos: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("fix", "tiny-planted", "test-time", photos, "-o", tmp_path / "new", "--resume")
    _, error, code = run(capsys, *words)
    assert code == 0
    assert f"no run in {tmp_path / 'new'} yet; this begins one" in error


def test_the_record_says_what_was_cured_on(photos: Path, tmp_path: Path, capsys: Any) -> None:
    (photos / "broken.png").write_bytes(b"no image")
    out = tmp_path / "run"
    words = ("fix", "tiny-planted", "test-time", photos, photos / "0.png", "-o", out)
    _, error, code = run(capsys, *words)
    assert code == 0
    assert "1 of 8 files were named twice" in error
    assert error.count("broken.png") == 1
    record = json.loads((out / "run.json").read_text())
    assert record["skipped"] == [[str(photos / "broken.png"), "not an image, or broken at its beginning"]]
    assert record["images"] == {"given": [str(photos), str(photos / "0.png")], "count": 7, "tested": 7}
    assert record["weights_hash"] == weights_hash(regista.load("tiny-planted").module)
    assert record["fixed_weights_hash"]


def test_a_failed_run_leaves_its_folder_free(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    for _ in range(2):  # the second try meets the same mistake, not the remains of the first
        _, error, code = run(capsys, "fix", "tiny", "test_time", photos, "-o", out)
        assert code == 1
        assert "shows no outlier tokens" in error
    assert not out.exists()
    for command in (("diagnose", "tinny", photos), ("compare", "tiny", "tinny", "--images", photos)):
        _, error, code = run(capsys, *command, "-o", out)
        assert code == 1
        assert "unknown model" in error
        assert not out.exists()


def test_an_old_run_survives_a_mistake_in_the_next(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert run(capsys, "fix", "tiny", "trained", "-o", out, "-q")[2] == 0
    record = (out / "run.json").read_bytes()
    for words in (("fix", "tinny", "trained"), ("fix", "tiny-planted", "test_time", photos, "--format", "onnx")):
        assert run(capsys, *words, "-o", out, "--force")[2] == 1
        assert (out / "run.json").read_bytes() == record


def test_cautions_are_printed(photos: Path, tmp_path: Path, capsys: Any) -> None:
    _, error, _ = run(capsys, "fix", "tiny", "trained", photos, "--registers", 4, "-o", tmp_path / "run")
    assert "random and untrained" in error
    _, error, _ = run(capsys, "fix", "tiny-planted", "test_time", photos, "top_k=0", "-o", tmp_path / "idle")
    assert "register stays idle" in error
    assert "no cure: " in error
    assert "fitted on 6 images only" in error


def test_an_export_that_fails_after_all_loses_no_model(
    photos: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regista.export import model_export

    def refuse(*_: Any) -> None:
        raise ValueError("the tokens differ")

    monkeypatch.setitem(model_export._WRITERS, "timm", refuse)
    out = tmp_path / "run"
    _, error, code = run(capsys, "fix", "tiny", "trained", "--format", "timm", "-o", out)
    assert code == 0
    assert "written for Regista, not as timm: the tokens differ" in error
    assert regista.load(out / "model").num_register_tokens == 4


def test_ablate(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    settings = ("epochs=1", "num_views=2", "batch_size=3", "held_out=0.4", "lr=1e-5", "image_size=56")
    words = ("ablate", "tiny", photos, *settings, "--study", "registers", "-o", out, "-q")
    text, _, code = run(capsys, *words)
    assert code == 0
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == [
        "teacher", "registers-0", "registers-1", "registers-4", "registers-16"
    ]  # fmt: skip
    assert (out / "registers.md").read_text() == text
    assert run(capsys, *words, "--resume")[0] == text
    other = [word if word != "lr=1e-5" else "lr=2e-5" for word in words]
    _, error, code = run(capsys, *other, "--resume")
    assert code == 1
    assert "lr 1e-05, now 2e-05" in error
