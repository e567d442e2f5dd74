"""``regista compare`` as a user types it, on the tiny model and on files made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from regista.backbones.tiny import tiny_vit
from regista.cli.compare import denoiser
from tests.cli.calling import run


def test_writes_a_run_and_says_the_verdicts(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "tiny-planted", "tiny", "--images", photos, "--views", 3, "--rounds", 1) == 0
    said = capsys.readouterr()
    assert "tiny: cured: outliers" in said.out
    assert "the cost" in said.out
    assert "runs/compare-001/report.html" in said.err
    folder = Path("runs/compare-001")
    record = json.loads((folder / "run.json").read_text())
    assert record["kind"] == "comparison"
    assert record["pictures"] == {"poster": "poster.png"}
    with Image.open(folder / "poster.png") as poster:
        assert poster.width == 1600
    assert record["models"][0]["weights_hash"] != record["models"][1]["weights_hash"]
    assert record["models"][0]["comparison"]["to_denoised"]["others"]["mean"] < 1
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert run("report", folder) == 0
    assert (folder / "report.html").read_bytes() == page


def test_images_are_every_word_up_to_the_next_option(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [photos / "0.png", photos / "1.png"]
    quick = ("--no-denoised", "--rounds", 0)
    assert run("compare", "tiny", "tiny", "--images", *files, "batch_size=1", "--json", *quick) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["reference"] == "tiny"
    first, second = record["models"]
    assert first["images"]["names"] == [str(path) for path in files]
    assert second["comparison"]["verdict"] == "no gain"
    assert second["comparison"]["throughput"] is first["comparison"]["to_denoised"] is None
    assert run("compare", "--images", files[0], "-q", *quick, "--image-size", 84, 70, "-o", "run", "tiny", "tiny") == 0
    models = json.loads(Path("run/run.json").read_text())["models"]
    assert [entry["images"]["size"] for entry in models] == [[84, 70], [84, 70]]
    assert run("compare", "tiny", "tiny", "--images", files[0], "-q", *quick, "-o", "run") == 1
    assert "--force" in capsys.readouterr().err
    assert run("compare", "tiny", "tiny", "--images", files[0], "-q", *quick, "-o", "run", "--force") == 0


def test_skipped_images_are_named(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "text.jpg").write_text("no image")
    assert run("compare", "tiny", "tiny", "--images", photos, "--no-denoised", "--rounds", 0, "-o", "run") == 0
    assert f"skipped {photos / 'text.jpg'}" in capsys.readouterr().err
    assert len(json.loads(Path("run/run.json").read_text())["skipped"]) == 1


MISTAKES = {
    "one model": (["tiny", "--images", "photos"], "two models or more, got 1"),
    "models behind the images": (["--images", "photos", "tiny", "tiny"], "two models or more, got 0"),
    "no images": (["tiny", "tiny"], "no images given"),
    "no words": (["tiny", "tiny", "--images", "-q"], "no images given"),
    "no such file": (["tiny", "tiny", "--images", "nowhere/"], "nowhere"),
    "unknown model": (["tiny", "tinny", "--images", "photos"], "tinny"),
    "unknown setting": (["tiny", "tiny", "--images", "photos", "batchsize=4"], "batchsize"),
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_one_line(photos: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *words) == 1
    spoken = capsys.readouterr()
    assert spoken.out == ""
    assert spoken.err.startswith("regista: ")
    assert spoken.err.count("\n") == 1
    assert said in spoken.err


def test_denoised_features_do_not_depend_on_the_batch() -> None:
    images = torch.randn(3, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    denoise, backbone = denoiser(4), tiny_vit()
    whole = denoise(backbone, images)
    single = torch.cat([denoise(backbone, image) for image in images.split(1)])
    assert torch.allclose(whole, single, atol=1e-5)
    assert not torch.allclose(whole, backbone(images).patches, atol=1e-2)
