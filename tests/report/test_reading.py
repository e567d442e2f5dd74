"""Folders that are no diagnosis, or a broken one, get a message that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regista.report.reading import KINDS, open_run
from regista.results import RunFolder
from tests.report.run_folders import FakeModel, make_run


def test_reads_what_was_written(planted_run: Path) -> None:
    run = open_run(planted_run)
    assert [entry.model for entry in run.entries] == ["demo", "demo-planted"]
    arrays = run.arrays(run.entries[1])
    wanted = RunFolder.open(planted_run).read_arrays("arrays/01")
    assert set(arrays) == set(wanted)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])
    assert run.label == f"{planted_run.parent.name}/demo"


def test_no_folder_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(ValueError, match=f"{path.name}.*regista diagnose"):
            open_run(path)


def test_foreign_kind(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", kind="training")
    with pytest.raises(
        ValueError, match=r"kind 'training'.*diagnosis, comparison, demo, checkpoints.*regista diagnose"
    ):
        open_run(tmp_path / "run")


def test_a_cure_is_told_where_its_page_comes_from(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", kind="fix")
    with pytest.raises(ValueError, match=r"run\.json .*regista compare MODEL .*/run/model --images"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_run(tmp_path: Path, kind: str) -> None:
    RunFolder.create(tmp_path / "run", kind=kind)
    with pytest.raises(ValueError, match=r"did not come to its end.*--force"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize("models", [[{}], [{"model": "a"}], ["text"], [None], [[1, 2]]])
def test_foreign_models(tmp_path: Path, models: list[Any]) -> None:
    run = make_run(tmp_path / "run", FakeModel())
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "models": models}))
    with pytest.raises(ValueError, match="not the diagnosis of a model"):
        open_run(run)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"models": [1]}'])
def test_damaged_record(planted_run: Path, tmp_path: Path, content: bytes) -> None:
    run = shutil.copytree(planted_run, tmp_path / "run")
    (run / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json"):
        open_run(run)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("norm_maps", np.ones((3, 9)), r"norm_maps has the shape \(3, 9\), wanted 3 dimensions"),
        ("norm_maps", np.ones((3, 12, 9)), "do not go together"),
        ("outlier_masks", np.ones((2, 9, 12), bool), r"\[2, 3\] images"),
        ("thumbnails", np.ones((3, 20, 20, 4), np.uint8), "thumbnails has 4 channels"),
        ("thumbnails", np.ones((3, 20, 20, 3), np.float32), "float.*uint8"),
        ("pca_maps", np.ones((3, 9, 12, 2)), "pca_maps has 2 channels"),
        ("histogram_edges", np.ones(7), "edges of the histogram"),
        ("score_maps", np.ones((0, 9, 12)), "score_maps has the shape"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, name: str, array: np.ndarray, message: str) -> None:
    path = make_run(tmp_path / "run", FakeModel())
    folder = RunFolder.open(path)
    folder.write_arrays("arrays/00", {**folder.read_arrays("arrays/00"), name: array})
    run = open_run(path)
    with pytest.raises(ValueError, match=rf"arrays/00\.safetensors: .*{message}.*make the run again"):
        run.arrays(run.entries[0])


def test_arrays_that_are_gone(planted_run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(planted_run, tmp_path / "run")
    (path / "arrays" / "00.safetensors").unlink()
    run = open_run(path)
    with pytest.raises(ValueError, match=r"00\.safetensors.*make the run again"):
        run.arrays(run.entries[0])


def test_arrays_outside_the_folder(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path / "run", FakeModel(changes={"arrays": "../../secret"})))
    with pytest.raises(ValueError, match="no name inside a run folder"):
        run.arrays(run.entries[0])


def test_arrays_without_nan_and_of_full_precision(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", FakeModel())
    folder = RunFolder.open(path)
    half = folder.read_arrays("arrays/00")["norm_maps"].astype(np.float16)
    half[0, 0, 0] = np.nan
    folder.write_arrays("arrays/00", {**folder.read_arrays("arrays/00"), "norm_maps": half, "unknown": half})
    run = open_run(path)
    arrays = run.arrays(run.entries[0])
    assert "unknown" not in arrays
    assert arrays["norm_maps"].dtype == np.float64
    assert arrays["norm_maps"][0, 0, 0] == 0
