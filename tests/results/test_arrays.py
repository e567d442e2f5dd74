"""Arrays come back as they were."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from regista.results import RunFolder
from regista.results.arrays import DTYPES


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "test")


def test_all_types_and_forms_come_back(run: RunFolder) -> None:
    base = np.arange(24).reshape(2, 3, 4)
    arrays = {name: base.astype(name) for name in DTYPES}
    arrays |= {
        "bool mask": base % 3 == 0,
        "transposed": base.transpose(2, 0, 1),
        "strided": base[:, ::2, ::-1],
        "number": np.array(3.5),
        "empty": np.zeros((0, 5), np.float32),
        "big endian": base.astype(">f4"),
        "Größe": base,
    }
    path = run.write_arrays("arrays/00", arrays)
    assert path == run.path / "arrays/00.safetensors"
    for found in (run.read_arrays("arrays/00"), load_file(path)):
        assert found.keys() == arrays.keys()
        for key, wanted in arrays.items():
            assert np.array_equal(found[key], wanted), key
            assert found[key].shape == wanted.shape
            assert found[key].dtype == wanted.dtype.newbyteorder("=")
    assert run.write_arrays("none", {}).exists()
    assert run.read_arrays("none") == {}


def test_only_what_is_asked_for_is_read(run: RunFolder) -> None:
    run.write_arrays("x", {"big": np.zeros(4_000_000), "small": np.ones(3)})
    tracemalloc.start()
    found = run.read_arrays("x", keys=["small"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.keys() == {"small"}
    assert peak < 1_000_000
    with pytest.raises(ValueError, match=r"has no array other; it has (big, small|small, big)"):
        run.read_arrays("x", keys=["other"])


@pytest.mark.parametrize(
    "bad", [np.array(["text"]), np.array([object()]), np.array([1j]), np.array([1], np.longdouble)]
)
def test_types_that_do_not_fit_are_named(run: RunFolder, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"array 'bad' is of type"):
        run.write_arrays("x", {"good": np.ones(1), "bad": bad})
    assert not (run.path / "x.safetensors").exists()


def test_missing_and_damaged_files_are_named(run: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"gone\.safetensors: cannot read arrays"):
        run.read_arrays("gone")
    path = run.write_arrays("half", {"a": np.ones(1000)})
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"half\.safetensors: cannot read arrays"):
        run.read_arrays("half")


def test_memmap_is_filled_bit_by_bit(run: RunFolder) -> None:
    array = run.open_memmap("norms/all", (5, 3), np.float32)
    assert not array.any()
    for row in range(4):
        array[row] = row + 1
    array.flush()  # type: ignore[attr-defined]
    on_disk = np.load(run.path / "norms/all.npy", mmap_mode="r")
    assert on_disk.tolist() == [[row + 1] * 3 for row in range(4)] + [[0] * 3]
    resumed = run.open_memmap("norms/all", (5, 3), np.float32)
    resumed[4] = 5
    assert on_disk[4].tolist() == [5] * 3
    with pytest.raises(ValueError, match=r"holds \(5, 3\) float32, wanted \(6, 3\) float32"):
        run.open_memmap("norms/all", (6, 3), np.float32)
    (run.path / "bad.npy").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"bad\.npy: cannot open the array"):
        run.open_memmap("bad", (1,))
    assert (run.path / "bad.npy").read_bytes() == b"junk"
