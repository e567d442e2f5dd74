"""Every command as a user types it, on the tiny model and on files made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.backbones.tiny import tiny_vit
from tests.cli.calling import run


def test_diagnose_writes_a_run_and_says_the_verdict(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", "tiny", photos) == 0
    said = capsys.readouterr()
    assert "tiny: clean" in said.out
    assert "runs/diagnose-001/report.html" in said.err
    assert Path("runs/diagnose-001/report.html").stat().st_size > 10_000
    assert run("diagnose", "tiny", photos, "-q") == 0
    assert Path("runs/diagnose-002/run.json").exists()


def test_json_is_all_there_is_on_stdout(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", "tiny", photos, "--json", "batch_size=2") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["images"]["count"]) == ("clean", 3)
    assert run("diagnose", "tiny", photos, "-m", "tiny", "--json", "--no-attention") == 0
    records = json.loads(capsys.readouterr().out)["models"]
    assert [entry["measures"]["attention_sink"] for entry in records] == [None, None]


def test_planted_model_is_called_sick(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", "tiny-planted", photos, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "artifacts"
    assert "high-norm" in record["kinds"]
    assert record["onset_block"] == record["planted"]["block"]
    assert record["planted"]["recall"] >= 0.95


def test_checkpoints_of_a_run_come_in_order(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1000, 200):
        backbone = tiny_vit(seed=step)
        backbone.save_pretrained(Path(f"step{step}"))
    assert run("diagnose", "tiny", photos, "--checkpoints", "step*", "--json") == 0
    records = json.loads(capsys.readouterr().out)["models"]
    assert [Path(entry["model"]).name for entry in records] == ["step200", "step1000"]


def test_report_is_made_again(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("diagnose", "tiny", photos, "-o", "run")
    page = Path("run/report.html")
    before = page.read_bytes()
    page.unlink()
    assert run("report", "run") == 0
    assert page.read_bytes() == before
    assert run("report", photos) == 1
    assert "not a run folder" in capsys.readouterr().err


def test_runs_are_not_overwritten(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", "tiny", photos, "-o", "run", "-q") == 0
    assert run("diagnose", "tiny", photos, "-o", "run", "-q") == 1
    assert "--force" in capsys.readouterr().err
    assert run("diagnose", "tiny", photos, "-o", "run", "-q", "--force") == 0
    assert run("diagnose", "tiny", photos, "-o", photos, "-q", "--force") == 1
    assert len(list(photos.iterdir())) == 3


def test_bad_images_are_named_skipped_and_counted(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "empty.png").touch()
    (photos / "text.jpg").write_text("no image")
    (photos / "half.png").write_bytes((photos / "0.png").read_bytes()[:300])
    Image.new("CMYK", (40, 30), (10, 20, 30, 40)).save(photos / "cmyk.jpg")
    assert run("diagnose", "tiny", photos, "-o", "run") == 0
    said = capsys.readouterr().err
    for name in ("empty.png", "text.jpg", "half.png"):
        assert f"skipped {photos / name}" in said
    record = json.loads(Path("run/run.json").read_text())
    assert len(record["skipped"]) == 3
    assert record["models"][0]["images"]["count"] == 4


MISTAKES = {
    "no image left": ["diagnose", "tiny", "bad.png"],
    "no images": ["diagnose", "tiny"],
    "no such file": ["diagnose", "tiny", "nowhere/"],
    "unknown model": ["diagnose", "tinny", "photos"],
    "a file, not a model": ["inspect", "bad.png"],
    "unknown setting": ["diagnose", "tiny", "photos", "batchsize=4"],
    "wrong size": ["diagnose", "tiny", "photos", "--image-size", "5", "0"],
    "indivisible": ["diagnose", "tiny", "photos", "--image-size", "60", "60", "--policy", "error"],
    "no checkpoints": ["diagnose", "tiny", "photos", "--checkpoints", "none*"],
    "missing config": ["diagnose", "tiny", "photos", "--config", "none.yaml"],
    "missing boxes": ["diagnose", "tiny", "photos", "--boxes", "none.csv"],
    "wrong suffix": ["extract", "tiny", "photos", "-o", "features.csv"],
    "unknown features": ["extract", "tiny", "photos", "--features", "colours"],
    "no such block": ["extract", "tiny", "photos", "--block", "44"],
    "absent device": ["inspect", "tiny", "--device", "mps"],
}


@pytest.mark.parametrize("words", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_one_line(photos: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.png").write_bytes(b"not an image")
    assert run(*words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("regista: ")
    assert said.err.count("\n") == 1
    assert not Path("runs").exists() or not any(Path("runs").rglob("report.html"))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_extract_writes_features(photos: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("extract", "tiny", photos, "-o", f"out{suffix}", "--image-size", 84, 70) == 0
    assert "3x30x64" in capsys.readouterr().out
    assert run("extract", "tiny", photos, "-o", f"out{suffix}") == 1
    assert "--force" in capsys.readouterr().err
    if suffix == ".npz":
        with np.load(f"out{suffix}") as file:
            assert file["patches"].shape == (3, 30, 64)


def test_inspect_and_doctor_speak_text_and_json(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "tiny") == 0
    assert "1 cls + 64 patches" in capsys.readouterr().out
    assert run("inspect", "tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_register_tokens"] == 0
    assert run("doctor") == 0
    assert "torch" in capsys.readouterr().out
    assert run("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["torch"]


@pytest.mark.slow
@pytest.mark.weights
def test_demo_shows_a_clean_and_a_planted_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--photos", 2, "--json") == 0
    clean, planted = json.loads(capsys.readouterr().out)["models"]
    assert (clean["verdict"], planted["verdict"]) == ("clean", "artifacts")
    assert planted["onset_block"] == planted["planted"]["block"]
    assert min(planted["planted"]["precision"], planted["planted"]["recall"]) >= 0.95
    assert Path("runs/demo/report.html").exists()


def test_a_run_keeps_its_log_and_the_hash_of_the_weights(photos: Path) -> None:
    run("diagnose", "tiny", photos, "-m", "tiny-planted", "-o", "run", "-q")
    models = json.loads(Path("run/run.json").read_text())["models"]
    logged = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    hashes = [entry["weights_hash"] for entry in models]
    assert hashes[0] != hashes[1]
    assert [event["weights_hash"] for event in logged if event["event"] == "diagnosed"] == hashes
