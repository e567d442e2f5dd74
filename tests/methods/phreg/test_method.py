"""PH-Reg as a method: what is trained, what is not, what is recorded, and going on after a kill."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista.backbones.tiny import tiny_vit
from regista.methods.phreg import denoise
from regista.methods.phreg.computing import image_views
from regista.methods.phreg.config import PhregConfig
from regista.methods.phreg.distilling import split, train_config
from regista.methods.phreg.method import Phreg, image_files, what_training_did
from regista.methods.phreg.student import make_student, parts_of, trained_parameters
from regista.methods.protocol import Workspace
from tests.backbones.probes import pictures

SHORT: dict[str, Any] = {"registers": 2, "epochs": 2, "num_views": 2, "batch_size": 2, "held_out": 0.4, "lr": 1e-4}


def model() -> Any:
    return tiny_vit(image_size=(56, 56))


def state_of(backbone: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in backbone.module.state_dict().items()}


# The student ---------------------------------------------------------------------------------


def test_a_student_without_registers_is_its_teacher() -> None:
    teacher = model()
    images = pictures(teacher, 2)
    assert torch.equal(make_student(teacher, 0, 0).module.state_dict()["cls_token"], teacher.module.cls_token)
    assert torch.equal(make_student(teacher, 0, 0)(images).tokens, teacher(images).tokens)


def test_registers_are_drawn_from_the_seed() -> None:
    teacher = model()
    first, again, other = (make_student(teacher, 64, seed).register_table() for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.detach().std()) * teacher.embed_dim**0.5 == pytest.approx(1, rel=0.05)
    assert torch.linalg.matrix_rank(first.detach().squeeze(0)) == 64


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_counts_of_the_released_dinov2(library: str) -> None:
    """8,606,208 trained parameters of DINOv2-B at 518 px, 16 registers."""
    from regista.backbones.live import from_module
    from regista.backbones.meta_build import shapes_only

    with shapes_only():
        if library == "timm":
            timm = pytest.importorskip("timm")
            module = timm.create_model("vit_base_patch14_dinov2", num_classes=0)
        else:
            transformers = pytest.importorskip("transformers")
            module = transformers.Dinov2Model(transformers.Dinov2Config(image_size=518, patch_size=14))
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    teacher = from_module(module)
    student = make_student(teacher, 16, 0)
    released = trained_parameters(student, teacher, parts_of("released", clip=False))
    assert sum(parameter.numel() for parameter in released.values()) == 8_606_208
    paper = trained_parameters(student, teacher, parts_of("paper", clip=False))
    assert set(paper) < set(released)


def test_unknown_parts_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown \['heads'\]"):
        parts_of("registers,heads", clip=False)
    teacher = model()
    with pytest.raises(ValueError, match="blocks 0 to 3"):
        trained_parameters(teacher, teacher, ("block:4",))
    with pytest.raises(ValueError, match="nothing would be trained"):
        trained_parameters(teacher, teacher, ("registers",))


# Training ------------------------------------------------------------------------------------


def test_only_what_is_trained_changes(photos: list[Path]) -> None:
    teacher = model()
    before = state_of(teacher)
    cured = regista.fix(teacher, "phreg", photos, **SHORT)
    assert all(torch.equal(value, before[name]) for name, value in teacher.module.state_dict().items())
    fresh = make_student(teacher, 2, 0)
    trained = set(trained_parameters(fresh, teacher, parts_of("paper", clip=False)))
    for name, value in cured.module.state_dict().items():
        assert torch.equal(value, fresh.module.state_dict()[name]) == (name not in trained), name
    state = cured.history[-1]["state"]
    assert state["steps"] == 2 * 2
    assert {"held_out_loss", "held_out_cosine", "held_out_mse"} <= set(state["after"])
    assert state["trained"]["tensors"] == len(trained)
    assert cured.needs_regista is None


def test_training_lowers_the_held_out_loss(photos: list[Path]) -> None:
    """Random registers disturb the patches; trained ones no longer do."""
    longer = {**SHORT, "registers": 16, "num_views": 1, "epochs": 30, "lr": 1e-3, "unfrozen": "registers"}
    state = regista.fix(model(), "phreg", photos, **longer).history[-1]["state"]
    assert state["after"]["held_out_loss"] < 0.9 * state["before"]["held_out_loss"]


@pytest.mark.parametrize("targets", ["stored", "fresh"])
def test_the_same_twice(photos: list[Path], targets: str) -> None:
    first, second = (regista.fix(model(), "phreg", photos, **SHORT, targets=targets) for _ in range(2))
    assert all(torch.equal(value, state_of(second)[name]) for name, value in state_of(first).items())
    other = regista.fix(model(), "phreg", photos, **SHORT, targets=targets, seed=1)
    assert not torch.equal(state_of(other)["reg_token"], state_of(first)["reg_token"])


def test_the_rate_is_the_best_on_held_out_images(photos: list[Path]) -> None:
    rates = (1e-6, 3e-4)
    cured = regista.fix(model(), "phreg", photos, **{**SHORT, "lr": None}, lr_candidates=rates, lr_epochs=2)
    state = cured.history[-1]["state"]
    losses = {tried["lr"]: tried["held_out_loss"] for tried in state["lr_tried"]}
    assert set(losses) == set(rates)
    assert state["lr"] == min(losses, key=lambda rate: losses[rate])


def test_rates_fall_to_a_twentieth() -> None:
    config = train_config(PhregConfig(), 1e-4, 100)
    assert (config.lr, config.end_lr, config.schedule) == (1e-4, pytest.approx(5e-6), "exponential-epochs")
    assert train_config(PhregConfig(lr=3e-4, end_lr=1e-5), 3e-4, 100).end_lr == 1e-5


def test_split() -> None:
    for share, held in ((0.1, 1), (0.5, 5), (0.99, 9)):
        train, out = split(range(10), share, 3)
        assert len(out) == held
        assert sorted([*train, *out]) == list(range(10))
        assert split(range(10), share, 3) == (train, out)
    with pytest.raises(ValueError, match="two are needed"):
        split([4], 0.5, 0)


def test_mistakes(photos: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backbone = model()
    with pytest.raises(ValueError, match="give files"):
        regista.fix(backbone, "phreg", pictures(backbone, 2))
    with pytest.raises(ValueError, match="at least two images"):
        regista.fix(backbone, "phreg", photos[:1], **SHORT)
    with pytest.raises(ValueError, match="is for CLIP models"):
        regista.fix(backbone, "phreg", photos, **SHORT, read_out="clip-released")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no image"):
        image_files(tmp_path / "empty")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"targets need .* MiB"):
        regista.fix(backbone, "phreg", photos, **SHORT)


@pytest.mark.parametrize(("change", "message"), [
    ({"lr": float("nan")}, "learning rates are positive"),
    ({"lr": 0.0}, "learning rates are positive"),
    ({"lr_candidates": ()}, "learning rates are positive"),
    ({"end_lr": 1e-5}, "end_lr goes with a larger lr, got end_lr 1e-05 and lr None"),
    ({"lr": 1e-5, "end_lr": 1e-4}, "end_lr goes with a larger lr"),
    ({"weight_decay": float("nan")}, "weight_decay is 0 or more, got nan"),
    ({"mse_scale": -1.0}, "mse_scale is 0 or more, got -1.0"),
    ({"num_workers": -1}, "num_workers is 0 or more, got -1"),
    ({"seed": -1}, "seed is 0 or more, got -1"),
    ({"held_out": 0.99}, "held_out is a share above 0 and at most 0.5"),
    ({"epochs": 0}, "^epochs is at least 1, got 0"),
    ({"num_views": 0}, "^num_views is at least 1, got 0"),
    ({"shift_ratio": 1.0}, "shift_ratio"),
    ({"unfrozen": "nonsense"}, r"unfrozen: unknown \['nonsense'\]"),
])  # fmt: skip
def test_settings_are_checked_before_anything_is_computed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PhregConfig(**change)


def test_what_a_model_cannot_do_is_said_before_targets_are_computed(photos: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has blocks 0 to 3"):
        regista.fix(model(), "phreg", photos, workspace=tmp_path / "work", unfrozen="block:9", **SHORT)
    with pytest.raises(ValueError, match="clip-released"):
        regista.fix(model(), "phreg", photos, workspace=tmp_path / "work", read_out="clip-released", **SHORT)
    assert not (tmp_path / "work").exists()


def test_a_student_that_diverges_is_not_handed_out(photos: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"has diverged: on held-out images its cosine .* lower lr|not finite|NaN"):
        regista.fix(model(), "phreg", photos, **{**SHORT, "lr": 100.0})


def test_a_student_that_got_worse_comes_with_a_note() -> None:
    before = {"held_out_cosine": 0.9, "held_out_loss": 0.3}
    assert what_training_did(before, {"held_out_cosine": 0.95, "held_out_loss": 0.2}) == ()
    (note,) = what_training_did(before, {"held_out_cosine": 0.88, "held_out_loss": 0.35})
    assert "loss 0.3 -> 0.35, cosine to the denoised target 0.900 -> 0.880" in note
    for cosine in (0.4, float("nan")):
        with pytest.raises(ValueError, match="diverged"):
            what_training_did(before, {"held_out_cosine": cosine, "held_out_loss": 0.2})


def test_photos_that_cannot_be_read_are_named(photos: list[Path], tmp_path: Path) -> None:
    broken = photos[0].parent / "broken.png"
    broken.write_bytes(b"no image")
    for resume in (False, True):  # also where an earlier run found it
        work = Workspace(tmp_path / "work", resume)
        fixed = regista.fix(model(), "phreg", photos[0].parent, workspace=work, **SHORT)
        assert [note for note in fixed.notes if note.startswith(f"skipped {broken}: not an image")]


def test_a_photo_given_twice_counts_once(photos: list[Path]) -> None:
    """Else it could be trained on and held out."""
    assert image_files([photos[0].parent, photos[1]]) == sorted(photos)


def test_targets_of_another_model_are_refused(photos: list[Path], tmp_path: Path) -> None:
    work = tmp_path / "work"
    regista.fix(model(), "phreg", photos, workspace=work, **SHORT)
    with pytest.raises(ValueError, match="weights"):
        regista.fix(tiny_vit(seed=1, image_size=(56, 56)), "phreg", photos, workspace=Workspace(work, True), **SHORT)


# Denoising as a cure -------------------------------------------------------------------------


def test_denoising_alone(tmp_path: Path) -> None:
    teacher = model()
    images = pictures(teacher, 3)
    cured = regista.fix(teacher, "phreg", mode="denoise", num_views=4)
    grid = teacher.layout().grid_size
    found = cured(images, ["blocks.1.resid"])
    assert torch.equal(found.patches, denoise(teacher, images, views=image_views(0, 0, grid, 4, 0.15)))
    plain = teacher(images, ["blocks.1.resid"])
    assert found.cls is not None
    assert plain.cls is not None
    assert torch.equal(found.cls, plain.cls)
    assert torch.equal(found.captured["blocks.1.resid"], plain.captured["blocks.1.resid"])
    torch.testing.assert_close(found.tokens, torch.cat([cured(image).tokens for image in images.split(1)]))
    cured.save_pretrained(tmp_path / "cured")
    again = regista.load(tmp_path / "cured")
    assert torch.equal(again(images).tokens, found.tokens)
    twin = copy.deepcopy(cured)
    with torch.no_grad():
        twin.module.norm.weight.zero_()
    assert not torch.equal(twin(images).patches, found.patches)
    assert torch.equal(cured(images).tokens, found.tokens)


# Killed --------------------------------------------------------------------------------------

RUN = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import regista
from regista.backbones.tiny import tiny_vit
from regista.methods.protocol import Workspace
photos, work, slow = sorted(Path(sys.argv[1]).iterdir()), Path(sys.argv[2]), float(sys.argv[3])
def progress(what, done, of):
    print(what, done, flush=True)
    time.sleep(slow)
cured = regista.fix(tiny_vit(image_size=(56, 56)), "phreg", photos, progress=progress, registers=2, epochs=6,
                    num_views=2, batch_size=2, held_out=0.4, lr=1e-4, workspace=Workspace(work, resume=work.exists()))
torch.save(cured.module.state_dict(), work / "end.pt")
"""


def run(photos: Path, work: Path, slow: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(photos), str(work), str(slow)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(photos: Path, work: Path) -> None:
    with run(photos, work, 0) as process:
        assert process.communicate(timeout=120)[0].count("student")
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["targets 3", "student 5"])
def test_going_on_after_a_kill(photos: list[Path], tmp_path: Path, where: str) -> None:
    folder = photos[0].parent
    finish(folder, tmp_path / "whole")
    killed = run(folder, tmp_path / "killed", 0.2)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.strip() == where:
            os.kill(killed.pid, signal.SIGKILL)
            break
    assert killed.wait(20) == -signal.SIGKILL
    killed.stdout.close()
    finish(folder, tmp_path / "killed")
    whole, resumed = (torch.load(tmp_path / name / "end.pt", weights_only=True) for name in ("whole", "killed"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_the_method_says_what_it_needs() -> None:
    assert Phreg(PhregConfig()).needs_images
    assert not Phreg(PhregConfig(mode="denoise")).needs_images
