"""Weight files are read whole or refused in one sentence; no code in them runs."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regista.backbones.checkpoint_files import read_state_dict, weight_file

STATE = {"norm.weight": torch.arange(4.0), "blocks.0.mlp.fc1.weight": torch.ones(3, 4)}


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return set(got) == set(wanted) and all(torch.equal(got[key], wanted[key]) for key in wanted)


def write_shards(folder: Path, state: dict[str, Tensor]) -> Path:
    """One shard a tensor, and their index."""
    places = {}
    for number, (key, value) in enumerate(state.items()):
        places[key] = f"model-{number + 1:05}-of-{len(state):05}.safetensors"
        save_file({key: value}, folder / places[key])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.ckpt", "w.pth.tar"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save(STATE, tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert same(read_state_dict(tmp_path / name), STATE)


def test_safetensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    assert same(read_state_dict(tmp_path / "w.safetensors"), STATE)
    assert same(read_state_dict(str(tmp_path / "w.safetensors")), STATE)


def test_nesting_becomes_dots_and_other_values_are_passed_over(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimiser = torch.optim.Adam(module.parameters())
    content: dict[str, Any] = {
        "teacher": {"backbone.norm.weight": torch.ones(2)},
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, name="x"),
        "optimizer": optimiser.state_dict(),
        "history": [torch.ones(1)],
    }
    torch.save(content, tmp_path / "w.pth")
    assert same(read_state_dict(tmp_path / "w.pth"), {"teacher.backbone.norm.weight": torch.ones(2)})


def test_parameters_are_detached(tmp_path: Path) -> None:
    torch.save({"weight": nn.Parameter(torch.ones(2))}, tmp_path / "w.pth")
    assert not read_state_dict(tmp_path / "w.pth")["weight"].requires_grad


def test_shards(tmp_path: Path) -> None:
    index = write_shards(tmp_path, STATE)
    assert same(read_state_dict(index), STATE)
    assert same(read_state_dict(tmp_path), STATE)


def test_broken_shards_are_named(tmp_path: Path) -> None:
    index = write_shards(tmp_path, STATE)
    content = json.loads(index.read_text())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards are missing: model-00002-of-00002"):
        read_state_dict(index)
    content["weight_map"] = {"norm.weight": "../elsewhere.safetensors"}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lie beside their index"):
        read_state_dict(index)
    content["weight_map"] = dict.fromkeys(("norm.weight", "norm.bias"), "model-00001-of-00002.safetensors")
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"1 tensors of the index are in no shard, \['norm.bias'\]"):
        read_state_dict(index)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="weight_map"):
            read_state_dict(index)


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        weight_file(tmp_path)
    save_file(STATE, tmp_path / "mine.safetensors")
    assert weight_file(tmp_path).name == "mine.safetensors"
    torch.save(STATE, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"found mine\.safetensors, other\.pth"):
        weight_file(tmp_path)
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    assert weight_file(tmp_path).name == "pytorch_model.bin"
    save_file(STATE, tmp_path / "model.safetensors")
    assert weight_file(tmp_path).name == "model.safetensors"


class Payload:
    """Runs when it is unpickled by a loader that lets it."""

    ran = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (setattr, (Payload, "ran", True))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_run_code_are_refused(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "w.pth"
    torch.save({"model": STATE, "extra": Payload()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="would have to run code") as caught:
        read_state_dict(path)
    assert not Payload.ran
    assert "safetensors" in str(caught.value)
    if zipped:
        assert "setattr" in str(caught.value)


def test_whole_modules_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"would have to run code.*Linear"):
        read_state_dict(tmp_path / "w.pth")


def test_plain_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(pickle.dumps({"a": Payload()}))
    with pytest.raises(ValueError, match=r"w\.pt"):
        read_state_dict(tmp_path / "w.pt")
    assert not Payload.ran


def test_torchscript_is_told(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match="TorchScript archive"):
        read_state_dict(tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.bin"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.98])
def test_files_cut_short(tmp_path: Path, name: str, kept: float) -> None:
    path = tmp_path / name
    state = {"weight": torch.randn(100, 100)}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=r"is not a whole .* file .*again") as caught:
        read_state_dict(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "Git LFS pointer"),
        (b"\x00\xff not weights at all" * 20, "is not a whole"),
        (b"<html>404</html>" * 20, "is not a whole"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes, wanted: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=wanted):
        read_state_dict(tmp_path / name)


def test_missing_and_odd_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no weight file"):
        read_state_dict(tmp_path / "none.pth")
    (tmp_path / "w.npz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"got '\.npz'"):
        read_state_dict(tmp_path / "w.npz")
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="no tensors in it"):
        read_state_dict(tmp_path / "w.pth")
