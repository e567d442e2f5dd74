"""The folder of a run: its record, arrays and log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from regista.results.arrays import load_arrays, make_memmap, save_arrays
from regista.results.provenance import library_versions, source_commit
from regista.results.record import FORMAT, RunRecord, read_record
from regista.results.writing import PARTIAL, in_words, plain, write_whole

RECORD = "run.json"
LOG = "log.jsonl"


class RunFolder:
    """One run on disk, the one thing that passes between commands.

    Made by ``create`` or ``open``. Every file but the log and memory-mapped arrays is written
    whole or not at all: a full disk or a kill leaves the old one.

    Attributes:
        path: The folder.
        record: What ``run.json`` holds.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def create(cls, path: str | Path, kind: str, *, force: bool = False, resume: bool = False) -> RunFolder:
        """Begin a run in a new or empty folder, or go on with one.

        Args:
            path: The folder; made with its parents.
            kind: What makes the run.
            force: Empty the folder if it holds a run. One that holds anything else is never touched.
            resume: Go on with the run in the folder; begin one if there is none.

        Raises:
            ValueError: if the folder holds something and neither option allows it; if ``resume``
                finds a run of another kind; if the folder cannot be written.
        """
        path = Path(path)
        there = cls.check(path, kind, force=force, resume=resume)
        if there is not None:
            return there
        if path.is_dir() and not _is_empty(path):
            _clear(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {path}: {in_words(error)}") from error
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        command = [str(plain(word, "command", [])) for word in [Path(sys.argv[0] or "python").name, *sys.argv[1:]]]
        record = RunRecord(kind, created, command, versions=library_versions(), commit=source_commit())
        run = cls(path, record)
        run._write_record(record)
        return run

    @classmethod
    def check(cls, path: str | Path, kind: str, *, force: bool = False, resume: bool = False) -> RunFolder | None:
        """Refuse what ``create`` would, and touch nothing: the run to go on with, or None if one is to begin.

        Raises:
            ValueError: as ``create``, but for what only writing shows.
        """
        path = Path(path)
        if force and resume:
            raise ValueError("--force begins anew and --resume goes on; give one of them")
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, not a folder for a run")
        if not path.is_dir() or _is_empty(path):
            return None
        if not _is_run(path):
            raise ValueError(
                f"{path} holds files that are no run of regista, which --force does not replace either; "
                "choose another folder"
            )
        if resume:
            return cls._resumed(path, kind)
        if not force:
            raise ValueError(f"{path} holds a run already; --force (force=True) replaces it")
        return None

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A run that is there.

        Raises:
            ValueError: if the folder is missing, holds no run, or its record is damaged or newer.
        """
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder")
        if not (path / RECORD).exists():
            raise ValueError(f"{path} is not a run folder: it has no {RECORD}")
        return cls(path, read_record(path / RECORD))

    @classmethod
    def _resumed(cls, path: Path, kind: str) -> RunFolder:
        run = cls.open(path)
        if run.record.kind != kind:
            raise ValueError(
                f"{path} holds a run of kind {run.record.kind!r}, not {kind!r}; it cannot be resumed as such"
            )
        return run

    def update(self, **changes: Any) -> RunRecord:
        """Replace values of the record, and write it; see ``RunRecord`` for the names.

        Other names are kept beside them. numpy values, paths, tuples, enums and dataclasses
        are made plain; NaN and infinity become null and are listed under ``not_finite``.

        Raises:
            ValueError: for a value that JSON cannot hold, or if it cannot be written; the
                record is then as before.
        """
        record = self.record.updated(changes)
        self._write_record(record)
        self.record = record
        return record

    @contextmanager
    def worth_keeping(self, *results: str) -> Iterator[None]:
        """Within, a mistake of the user's takes the folder away again, so that it is free for the next try.

        Args:
            results: Names in the folder; it stays if one of them is there.
        """
        try:
            yield
        except ValueError:
            if not any((self.path / name).exists() for name in results):
                with contextlib.suppress(ValueError, OSError):
                    _clear(self.path)
                    self.path.rmdir()
            raise

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> Path:
        """Write named arrays into one safetensors file.

        Args:
            name: File in the folder, without suffix; may hold "/".
            arrays: {key: array} of numbers or bools.

        Raises:
            ValueError: for a type that safetensors lacks, or if it cannot be written.
        """
        path = self._inside(name, ".safetensors")
        save_arrays(path, arrays)
        return path

    def read_arrays(self, name: str, keys: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Read what ``write_arrays`` wrote. The file is memory-mapped: only ``keys`` are read from it.

        Raises:
            ValueError: if the file is missing or damaged, or has no such key.
        """
        return load_arrays(self._inside(name, ".safetensors"), keys)

    def open_memmap(self, name: str, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """A big array as a memory-mapped .npy file, to be filled bit by bit; zeros at first.

        Its space on disk is taken at once. A file that is there already with this shape and
        type is opened as it is (a resumed run). ``numpy.load(path, mmap_mode="r")`` reads it.

        Raises:
            ValueError: if there is another array of that name, or the disk has no room.
        """
        return make_memmap(self._inside(name, ".npy"), shape, dtype)

    def log(self, event: Mapping[str, Any] | str, **values: Any) -> None:
        """Append a line to ``log.jsonl``: the time, and ``event`` (a dict, or a name with values).

        NaN and infinity become null.

        Raises:
            ValueError: for a value that JSON cannot hold, or if it cannot be written.
        """
        entry = {"event": event, **values} if isinstance(event, str) else {**event, **values}
        entry = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **entry}
        line = json.dumps(plain(entry, "", []), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with (self.path / LOG).open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else "\n" + line  # a kill left half a line
                file.write(line.encode())
        except OSError as error:
            raise ValueError(f"cannot write {self.path / LOG}: {in_words(error)}") from error

    def read_log(self) -> Iterator[dict[str, Any]]:
        """The log, line by line; lines that a kill cut short are passed over."""
        try:
            lines = (self.path / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _write_record(self, record: RunRecord) -> None:
        text = json.dumps(record.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

        def write(partial: Path) -> None:
            partial.write_bytes(text.encode())

        write_whole(self.path / RECORD, write)

    def _inside(self, name: str, suffix: str) -> Path:
        """A file of this folder by its name without suffix; never one outside."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or any(part.startswith(".") for part in parts):
            raise ValueError(f"{name!r} is no name inside a run folder; wanted one such as 'arrays/00'")
        path = self.path.joinpath(*parts)
        return path.with_name(path.name + suffix)


def _entries(path: Path) -> list[Path]:
    """What lies in a folder, but for what a killed write left there."""
    try:
        return [entry for entry in path.iterdir() if not (entry.name.startswith(".") and entry.suffix == PARTIAL)]
    except OSError as error:
        raise ValueError(f"{path}: {in_words(error)}") from error


def _is_empty(path: Path) -> bool:
    return not _entries(path)


def _is_run(path: Path) -> bool:
    """Whether a folder is one of ours, of whatever version: its record says so."""
    try:
        values = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("format") == FORMAT


def _clear(path: Path) -> None:
    """Empty a run folder, the record last: a kill on the way leaves a folder known as ours."""
    try:
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name == RECORD):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ValueError(f"cannot empty {path}: {in_words(error)}") from error
