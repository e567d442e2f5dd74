"""Versions, commits and weight hashes say what they should."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import regista
from regista.results import provenance, weights_hash
from regista.results.provenance import library_versions, source_commit

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "b.bias": RANDOM.normal(size=4).astype(np.float32),
    "a.weight": RANDOM.normal(size=(3, 4)).astype(np.float32),
}


def test_hash_depends_on_all_and_only_what_counts() -> None:
    wanted = weights_hash(WEIGHTS.items())
    assert re.fullmatch("[0-9a-f]{64}", wanted)
    assert weights_hash(reversed(WEIGHTS.items())) == wanted
    assert weights_hash((name, array.copy(order="F")) for name, array in WEIGHTS.items()) == wanted
    assert weights_hash((name, array.astype(">f4")) for name, array in WEIGHTS.items()) == wanted
    changed = [
        {**WEIGHTS, "b.bias": np.nextafter(WEIGHTS["b.bias"], np.float32(9))},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].reshape(4, 3)},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].view(np.int32)},
        {"b.bias": WEIGHTS["b.bias"]},
        {"b.bia": WEIGHTS["b.bias"], "a.weight": WEIGHTS["a.weight"]},
        {**WEIGHTS, "empty": np.zeros((0, 3))},
        {**WEIGHTS, "number": np.float32(1)[()]},
    ]
    hashes = {weights_hash((name, np.asarray(array)) for name, array in other.items()) for other in changed}
    assert len(hashes | {wanted}) == len(changed) + 1


def test_hash_is_the_same_in_every_process_and_version() -> None:
    fixed = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([True, False])}
    assert weights_hash(fixed.items()) == "a7d8eb07df425861ff769c6afba044dc245f3be5b20680e9dfdfddc2bc4bc957"


def test_hash_refuses() -> None:
    with pytest.raises(ValueError, match="two arrays are named 'a'"):
        weights_hash([("a", np.ones(1)), ("a", np.ones(1))])
    with pytest.raises(ValueError, match="'a' holds objects"):
        weights_hash([("a", np.array([object()]))])


def test_versions() -> None:
    versions = library_versions()
    assert versions["regista"] == regista.__version__
    assert versions["python"] == sys.version.split(maxsplit=1)[0]
    assert versions["numpy"] == np.__version__
    assert {"torch", "timm", "transformers", "open_clip_torch"} <= versions.keys()


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_commit_is_that_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "src/regista/results/provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert source_commit() is None
    git(tmp_path, "init")
    (tmp_path / "other.txt").touch()
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-m", "a repository around an installed package")
    assert source_commit() is None
    git(tmp_path, "add", "src")
    git(tmp_path, "commit", "-m", "source")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit() == commit
    (tmp_path / "other.txt").write_text("no source")
    assert source_commit() == commit
    file.write_text("x = 2\n")
    assert source_commit() == f"{commit}+changes"
    monkeypatch.setenv("PATH", "")
    assert source_commit() is None
