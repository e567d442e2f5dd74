from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from regista.backbones.weight_cache import cache_directory, fingerprint, read_cached, write_cached


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGISTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("REGISTA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "regista"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "regista"


def test_what_is_written_is_read(own_cache: Path) -> None:
    tensors = {"a": torch.randn(3, 4).T, "b": torch.arange(5)}
    write_cached("thing", "source", tensors, {"cells": [[1, 2]], "kind": "content"})
    found = read_cached("thing", "source")
    assert found is not None
    assert found[1] == {"cells": [[1, 2]], "kind": "content"}
    assert found[0].keys() == tensors.keys()
    assert all(torch.equal(found[0][name], tensors[name]) for name in tensors)
    assert [path.name for path in own_cache.iterdir()] == ["thing.safetensors"]


def test_another_source_or_a_damaged_file_counts_as_absent(own_cache: Path) -> None:
    assert read_cached("thing", "source") is None
    write_cached("thing", "source", {"a": torch.ones(64)}, {})
    assert read_cached("thing", "other source") is None
    path = own_cache / "thing.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert read_cached("thing", "source") is None
    path.write_bytes(b"")
    assert read_cached("thing", "source") is None


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cached("thing", "old", {"a": torch.ones(2)}, {})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write_cached("thing", "new", {"a": torch.zeros(2)}, {})
    assert read_cached("thing", "new") is None
    assert read_cached("thing", "old") is not None
    assert [path.name for path in own_cache.iterdir()] == ["thing.safetensors"]


def test_a_directory_that_cannot_be_made_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGISTA_CACHE", str(tmp_path / "file" / "below"))
    write_cached("thing", "source", {"a": torch.ones(2)}, {})
    assert read_cached("thing", "source") is None


def test_fingerprint_sees_content_order_and_borders(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x" * 3_000_000)
    two.write_bytes(b"x" * 3_000_000)
    assert fingerprint(one, 1) == fingerprint(two, 1)
    assert (
        len(
            {
                fingerprint(one, 1),
                fingerprint(one, 2),
                fingerprint(1, one),
                fingerprint("ab", "c"),
                fingerprint("a", "bc"),
            }
        )
        == 5
    )
    two.write_bytes(b"x" * 2_999_999 + b"y")
    assert fingerprint(one, 1) != fingerprint(two, 1)
