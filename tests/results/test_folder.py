"""Run folders: who may write where, what is read back, what a full disk or a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regista.results import SCHEMA_VERSION, RunFolder
from regista.results import folder as folder_module


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "test")


def tree(path: Path) -> list[str]:
    return sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*"))


def test_create_update_open(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "new/deep/run", kind="diagnosis")
    run.update(config={"size": (518, 518)}, seed=3, models=[{"verdict": "clean"}], verdict="clean")
    again = RunFolder.open(str(run.path))
    assert again.record == run.record
    assert again.record.kind == "diagnosis"
    assert again.record.config == {"size": [518, 518]}
    assert again.record.models == again.record["models"] == [{"verdict": "clean"}]
    assert again.record["verdict"] == again.record.get("verdict") == "clean"
    assert again.record.get("nothing", 7) == 7
    assert again.record.versions["numpy"] == np.__version__
    again.update(seed=4)
    final = json.loads((run.path / "run.json").read_text())
    assert final["seed"] == 4
    assert final["verdict"] == "clean"
    assert tree(run.path) == ["run.json"]


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / ".run.json.12-ab.partial").touch()  # left by a kill
    assert RunFolder.create(tmp_path, "test").record.kind == "test"


def test_nothing_is_overwritten_without_force(run: RunFolder) -> None:
    run.write_arrays("arrays/00", {"a": np.ones(3)})
    run.log("begin")
    (run.path / "more").mkdir()
    (run.path / "more/x.txt").write_text("x")
    before = tree(run.path)
    with pytest.raises(ValueError, match=r"holds a run already; --force .force=True"):
        RunFolder.create(run.path, "test")
    assert tree(run.path) == before
    replaced = RunFolder.create(run.path, "other", force=True)
    assert tree(run.path) == ["run.json"]
    assert replaced.record.kind == "other"


@pytest.mark.parametrize("content", ["notes.txt", "run.json", "sub/run.json"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("text", ["important", "{}", '{"schema_version": 1, "kind": "other tool"}', "[1]"])
def test_a_strangers_folder_is_never_touched(tmp_path: Path, content: str, force: bool, text: str) -> None:
    path = tmp_path / "theirs"
    (path / content).parent.mkdir(parents=True)
    (path / content).write_text(text)
    for options in ({"force": force}, {"resume": not force, "force": force}):
        with pytest.raises(ValueError, match="no run of regista"):
            RunFolder.create(path, "test", **options)
    assert (path / content).read_text() == text


def test_force_does_not_follow_links(tmp_path: Path, run: RunFolder) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/x.txt").write_text("x")
    (run.path / "link").symlink_to(tmp_path / "precious")
    RunFolder.create(run.path, "test", force=True)
    assert tree(run.path) == ["run.json"]
    assert (tmp_path / "precious/x.txt").read_text() == "x"


def test_a_kill_while_emptying_leaves_a_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.path / "zz").mkdir()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(run.path, "test", force=True)
    monkeypatch.undo()
    assert RunFolder.create(run.path, "test", force=True).record.kind == "test"


def test_resume(tmp_path: Path, run: RunFolder) -> None:
    run.update(metrics={"step": 5})
    run.write_arrays("state", {"a": np.ones(3)})
    resumed = RunFolder.create(run.path, "test", resume=True)
    assert resumed.record == run.record
    assert tree(run.path) == ["run.json", "state.safetensors"]
    with pytest.raises(ValueError, match="kind 'test', not 'training'"):
        RunFolder.create(run.path, "training", resume=True)
    with pytest.raises(ValueError, match="give one of them"):
        RunFolder.create(run.path, "test", resume=True, force=True)
    assert RunFolder.create(tmp_path / "fresh", "test", resume=True).record.metrics == {}


def test_a_run_that_came_to_nothing_goes(tmp_path: Path) -> None:
    for results, stays in (((), False), (("work",), False), (("arrays", "work"), True)):
        run = RunFolder.create(tmp_path / "run", "test")
        run.write_arrays("arrays/00", {"a": np.zeros(2)})
        with pytest.raises(ValueError, match="a mistake"), run.worth_keeping(*results):
            raise ValueError("a mistake")
        assert run.path.exists() is stays
    with pytest.raises(KeyboardInterrupt), run.worth_keeping():
        raise KeyboardInterrupt
    assert run.path.exists()


def test_a_look_at_a_folder_touches_nothing(tmp_path: Path, run: RunFolder) -> None:
    assert RunFolder.check(tmp_path / "new", "test") is None
    assert not (tmp_path / "new").exists()
    before = (run.path / "run.json").read_bytes()
    assert RunFolder.check(run.path, "test", force=True) is None
    found = RunFolder.check(run.path, run.record.kind, resume=True)
    assert found is not None
    assert found.record == run.record
    assert (run.path / "run.json").read_bytes() == before
    with pytest.raises(ValueError, match="holds a run already"):
        RunFolder.check(run.path, run.record.kind)


def test_places_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "file", "test", force=True)
    with pytest.raises(ValueError, match="cannot make the folder"):
        RunFolder.create(tmp_path / "file/below", "test")
    with pytest.raises(ValueError, match="no such folder"):
        RunFolder.open(tmp_path / "gone")
    with pytest.raises(ValueError, match="not a run folder"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ['{"format": "regista-run", "sche', "", "null", "[]", '"x"', "\x00"])
def test_a_damaged_record_is_named(run: RunFolder, text: str) -> None:
    (run.path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: (the record is damaged|not the record)"):
        RunFolder.open(run.path)


def test_a_newer_record_is_refused_with_both_numbers(run: RunFolder) -> None:
    path = run.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": SCHEMA_VERSION + 4}))
    for options in ({}, {"resume": True}):
        with pytest.raises(ValueError, match=rf"version {SCHEMA_VERSION + 4}.*up to {SCHEMA_VERSION}|--force"):
            RunFolder.create(run.path, "test", **options) if options else RunFolder.open(run.path)
    assert RunFolder.create(run.path, "test", force=True).record.schema_version == SCHEMA_VERSION


def test_command_line_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/regista", "diagnose", "demo", "b\udce4d.jpg"])
    record = RunFolder.create(tmp_path / "run", "test").record
    assert record.command == ["regista", "diagnose", "demo", "b\\udce4d.jpg"]


def test_log(run: RunFolder) -> None:
    assert list(run.read_log()) == []
    run.log("begin", images=3)
    run.log({"loss": float("nan"), "note": "a\u2028b\nc", "step": np.int64(2)})
    with (run.path / "log.jsonl").open("a") as file:
        file.write('{"loss": 0.1, "st')  # killed while writing
    RunFolder.create(run.path, "test", resume=True).log("resumed")
    lines = list(run.read_log())
    assert [line.get("event") for line in lines] == ["begin", None, "resumed"]
    assert lines[0]["images"] == 3
    assert lines[1] | {"time": ""} == {"time": "", "loss": None, "note": "a\u2028b\nc", "step": 2}
    with pytest.raises(ValueError, match="x is a object"):
        run.log("bad", x=object())


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", ".hidden", "a\\b", "."])
def test_names_stay_inside(run: RunFolder, name: str) -> None:
    for call in (
        lambda: run.write_arrays(name, {"a": np.ones(1)}),
        lambda: run.read_arrays(name),
        lambda: run.open_memmap(name, (1,)),
    ):
        with pytest.raises(ValueError, match="no name inside a run folder"):
            call()
    assert tree(run.path) == ["run.json"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As if the disk were full after so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_leaves_the_old_files_whole(run: RunFolder) -> None:
    small, big = {"a": np.arange(10)}, {"a": np.arange(100000)}
    run.write_arrays("x", small)
    run.update(notes=["short"])
    with files_of_at_most(5000):
        with pytest.raises(ValueError, match=r"cannot write .*x\.safetensors.*unchanged"):
            run.write_arrays("x", big)
        with pytest.raises(ValueError, match=r"cannot write .*run\.json.*unchanged"):
            run.update(notes=["long" * 5000])
        with pytest.raises(ValueError, match="cannot make"):
            run.open_memmap("big", (100000,))
        with pytest.raises(ValueError, match="cannot write"):
            run.log("long" * 5000)
    assert np.array_equal(run.read_arrays("x")["a"], small["a"])
    assert run.record.notes == RunFolder.open(run.path).record.notes == ["short"]
    assert set(tree(run.path)) <= {"log.jsonl", "run.json", "x.safetensors"}
    run.update(notes=["works again"])


def test_a_full_disk_is_said_in_words(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = (run.path / "run.json").read_bytes()
    with pytest.raises(ValueError, match="the disk is full"):
        run.update(seed=1)
    assert (run.path / "run.json").read_bytes() == before
    assert tree(run.path) == ["run.json"]


def test_a_kill_between_writing_and_renaming(run: RunFolder) -> None:
    code = (
        "import os, sys; from pathlib import Path; from regista.results import RunFolder;"
        "run = RunFolder.open(sys.argv[1]); os.replace = Path.replace = lambda *_: os._exit(9); run.update(seed=5)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    assert done.returncode == 9
    assert RunFolder.open(run.path).record.seed is None
    assert len(tree(run.path)) == 2  # the new one lies beside it, unfinished
    assert RunFolder.create(run.path, "test", resume=True).update(seed=6).seed == 6


def test_written_files_have_usual_permissions(run: RunFolder) -> None:
    (run.path / "plain").touch()
    run.write_arrays("x", {"a": np.ones(1)})
    modes = {name: (run.path / name).stat().st_mode for name in ("plain", "run.json", "x.safetensors")}
    assert len(set(modes.values())) == 1, modes


def test_no_heavy_import() -> None:
    code = "import sys, regista.results; print([n for n in ('torch', 'PIL', 'timm', 'scipy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_any_value(run: RunFolder) -> None:
    values: dict[str, Any] = {
        "metrics": {"loss": float("inf"), "fine": np.float32(0.5)},
        "pictures": {"a": Path("b.png")},
    }
    record = run.update(**values, skipped=[(Path("x.jpg"), "empty")])
    assert record.metrics == {"loss": None, "fine": 0.5}
    assert record.not_finite == ["metrics.loss: inf"]
    assert record.skipped == [["x.jpg", "empty"]]
    json.loads((run.path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(name))
