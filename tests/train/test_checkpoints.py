"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from regista.train import checkpoints
from regista.train.checkpoints import CheckpointFolder
from tests.train.tasks import PointTask, lines, same_weights, train_points


def some(seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {"modules": {"a": torch.randn(3, 4, generator=generator)}, "optimizer": {"a/step": torch.tensor(2.0)}}


def folder_of(path: Path, *steps: int, keep: int | None = None) -> CheckpointFolder:
    store = CheckpointFolder(path / "checkpoints", keep)
    for step in steps:
        store.save(step, some(step), {"note": step})
    return store


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    found = folder_of(tmp_path, 3, 12).newest()
    assert found is not None
    assert (found.steps_done, found.state, found.path.name) == (12, {"note": 12}, "step-00000012")
    assert torch.equal(found.tensors("modules")["a"], some(12)["modules"]["a"])
    assert found.tensors("optimizer")["a/step"] == 2


def test_kinds_of_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    given = {
        "whole": base,
        "same": base,
        "turned": base.t(),
        "row": base[1],
        "repeated": base.sum().expand(5),
        "empty": torch.zeros(0, 2),
        "bytes": torch.tensor([1, 2], dtype=torch.uint8),
        "half": base.bfloat16(),
        "grad": torch.nn.Parameter(base.clone()),
    }
    store = CheckpointFolder(tmp_path)
    store.save(1, {"modules": given}, {})
    found = store.newest()
    assert found is not None
    back = found.tensors("modules")
    assert back.keys() == given.keys()
    assert all(torch.equal(back[key], given[key]) and back[key].dtype == given[key].dtype for key in given)


def test_none(tmp_path: Path) -> None:
    store = CheckpointFolder(tmp_path / "checkpoints")
    assert store.newest() is None
    assert store.steps() == []


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    assert folder_of(tmp_path, 1, 2, 5, 9, keep=2).steps() == [5, 9]
    assert folder_of(tmp_path / "all", 1, 2, 5, keep=None).steps() == [1, 2, 5]


def test_a_later_one_of_another_past_goes(tmp_path: Path) -> None:
    store = folder_of(tmp_path, 4, 8, keep=3)
    store.save(6, some(6), {})
    assert store.steps() == [4, 6]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_number(path: Path) -> None:
    content = json.loads(path.read_text())
    content["state"]["note"] = 999
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("modules.safetensors", cut, "has .* bytes, wanted"),
        ("modules.safetensors", flip, "modules.safetensors is damaged"),
        ("modules.safetensors", Path.unlink, "modules.safetensors: No such file"),
        ("optimizer.safetensors", flip, "optimizer.safetensors is damaged"),
        ("state.json", cut, "state.json is damaged"),
        ("state.json", change_number, "state.json is damaged"),
        ("state.json", Path.unlink, "state.json: No such file"),
    ],
)
def test_a_damaged_one_is_skipped(tmp_path: Path, file: str, harm: Any, words: str) -> None:
    store = folder_of(tmp_path, 3, 6)
    harm(store.path / "step-00000006" / file)
    found = store.newest()
    assert found is not None
    assert found.steps_done == 3
    (note,) = store.notes
    assert note.startswith("skipped the checkpoint step-00000006: ")
    assert re.search(words, note)


def test_none_whole(tmp_path: Path) -> None:
    store = folder_of(tmp_path, 3)
    cut(store.path / "step-00000003" / "state.json")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*step-00000003"):
        store.newest()


def test_a_newer_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "VERSION", 2)
    store = folder_of(tmp_path, 3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="newer regista"):
        store.newest()


@pytest.mark.parametrize("file", ["modules", "optimizer", "state"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: Exception) -> None:
    store = folder_of(tmp_path, 3)
    before = {path.name: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}

    def full(partial: Path, *_: Any) -> None:
        partial.write_bytes(b"half")
        raise error

    if file == "state":
        monkeypatch.setattr(checkpoints, "_write_text", full)
    else:
        save = checkpoints.save_file
        name = f".{file}.safetensors."
        monkeypatch.setattr(checkpoints, "save_file", lambda t, p: full(p) if p.name.startswith(name) else save(t, p))
    with pytest.raises(ValueError, match=r"step-00000006: the disk is full; the checkpoint of step 3 is unchanged"):
        store.save(6, some(6), {})
    assert {path.name: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before
    assert [path.name for path in store.path.iterdir()] == ["step-00000003"]


def test_training_into_a_full_disk_and_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through = PointTask()
    train_points(tmp_path / "a", task=through)
    save, room = checkpoints.save_file, [10]  # three files a checkpoint: those of steps 4, 6, 8, and a third of 12

    def fills_up(tensors: dict[str, Tensor], path: Path) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", fills_up)
    with pytest.raises(ValueError, match=r"the disk is full; the checkpoint of step 8 is unchanged.*--resume"):
        train_points(tmp_path / "b", checkpoint_every_steps=4)
    monkeypatch.undo()
    task = PointTask()
    assert train_points(tmp_path / "b", task=task, resume=True).resumed_from == 8
    assert same_weights(task.weights(), through.weights())
    assert lines(tmp_path / "b") == lines(tmp_path / "a")


def test_training_goes_on_from_the_one_before(tmp_path: Path) -> None:
    through = PointTask()
    train_points(tmp_path / "a", task=through)
    train_points(tmp_path / "b", checkpoint_every_steps=4, max_steps=8)
    newest = tmp_path / "b" / "checkpoints" / "step-00000008"
    cut(newest / "modules.safetensors")
    task = PointTask()
    result = train_points(tmp_path / "b", task=task, resume=True)
    assert result.resumed_from == 6  # the end of the first epoch
    assert "step-00000008: modules.safetensors has" in result.notes[0]
    assert not newest.exists()
    assert same_weights(task.weights(), through.weights())
    assert lines(tmp_path / "b") == lines(tmp_path / "a")
    assert lines(tmp_path / "b", "start")[-1]["notes"] == result.notes


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ValueError, match="checkpoints: Not a directory"):
        folder_of(tmp_path, 1)
