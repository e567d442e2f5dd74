"""Checkpoints that are whole or not there: a folder of safetensors files and one of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regista.results.writing import PARTIAL, in_words, plain, write_whole

STATE = "state.json"
FORMAT = "regista-checkpoint"
VERSION = 1
_NAME = re.compile(r"^step-(\d+)$")


class _DamagedError(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole.

    Attributes:
        path: Its folder.
        steps_done: Steps of the optimizer behind it.
        state: What was given to ``save`` beside the tensors.
    """

    path: Path
    steps_done: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU."""
        return dict(load_file(self.path / f"{name}.safetensors"))


@dataclass
class CheckpointFolder:
    """The checkpoints of a run, ``step-00000012`` and so on.

    Attributes:
        path: The folder they are in; made when the first one is written.
        keep: How many to keep; None for all.
        notes: What was skipped while reading, and why.
    """

    path: Path
    keep: int | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, steps_done: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint beside its place, flush it to disk, rename it, then drop the oldest.

        Args:
            steps_done: Names it.
            tensors: {file: {key: tensor}}, on any device; tensors may share memory.
            state: What JSON can hold.

        Raises:
            ValueError: if it cannot be written (disk full ...); those before stay as they were.
        """
        path = self.path / f"step-{steps_done:08d}"
        beside = self.path / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
        try:
            beside.mkdir(parents=True)
            for name, values in tensors.items():
                _write_tensors(beside / f"{name}.safetensors", values)
            _write_state(beside, steps_done, state)
            _flush(beside)
            if path.exists():  # a damaged one, or that of a future which is no more
                path.rename(beside.with_name(f"{beside.name}.old{PARTIAL}"))
            beside.rename(path)
            _flush(self.path)
        except (OSError, SafetensorError, ValueError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise ValueError(f"cannot write the checkpoint {path}: {_why(error)}; {self._what_is_left()}") from error
        self._tidy(steps_done)
        return path

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole; ``notes`` says which were skipped.

        Raises:
            ValueError: if there are some, and not one is whole.
        """
        self.notes = []
        steps = sorted(self.steps(), reverse=True)
        for steps_done in steps:
            path = self.path / f"step-{steps_done:08d}"
            try:
                return Checkpoint(path, steps_done, _verified(path, steps_done))
            except _DamagedError as error:
                self.notes.append(f"skipped the checkpoint {path.name}: {error}")
        if steps:
            raise ValueError(f"no checkpoint in {self.path} is whole: {'; '.join(self.notes)}. Begin the run anew")
        return None

    def steps(self) -> list[int]:
        """Steps done of all that are there, whole or not, in order."""
        try:
            names = [entry.name for entry in self.path.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ValueError(f"{self.path}: {in_words(error)}") from error
        return sorted(int(match.group(1)) for name in names if (match := _NAME.match(name)))

    def drop_after(self, steps_done: int) -> None:
        """Remove those later than the one a run goes on from: damaged ones."""
        for later in self.steps():
            if later > steps_done:
                shutil.rmtree(self.path / f"step-{later:08d}", ignore_errors=True)

    def _tidy(self, steps_done: int) -> None:
        """Remove the oldest, those later than the one just written, and what kills left half written."""
        past = [step for step in self.steps() if step <= steps_done]
        kept = past if self.keep is None else past[-self.keep :]
        stale = [self.path / f"step-{step:08d}" for step in self.steps() if step not in kept]
        with contextlib.suppress(OSError):
            stale += [entry for entry in self.path.iterdir() if entry.name.startswith(".step-")]
        for folder in stale:
            shutil.rmtree(folder, ignore_errors=True)

    def _what_is_left(self) -> str:
        steps = self.steps()
        last = f"the checkpoint of step {max(steps)} is unchanged" if steps else "there is none before it"
        return f"{last}. Make room, then go on with --resume (resume=True)"


def _write_tensors(path: Path, values: Mapping[str, Tensor]) -> None:
    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in values.items():
        tensor = value.detach().cpu().contiguous()
        where = tensor.untyped_storage().data_ptr()
        ready[key] = tensor.clone() if where in seen else tensor  # safetensors refuses shared memory
        seen.add(where)
    write_whole(path, lambda partial: save_file(ready, partial))


def _write_state(folder: Path, steps_done: int, state: Mapping[str, Any]) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in sorted(folder.iterdir())}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "steps_done": steps_done,
        "torch": torch.__version__,
        "files": files,
        "state": plain(state, "", []),
    }
    text = json.dumps({**content, "crc32": _crc32_of(content)}, indent=1, allow_nan=False)
    write_whole(folder / STATE, lambda partial: _write_text(partial, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _verified(path: Path, steps_done: int) -> dict[str, Any]:
    """The state of a checkpoint, once every byte of it was found as written."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        version = content["version"] if content["format"] == FORMAT else None
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"{path} was written by a newer regista; update this one")
        crc32 = content.pop("crc32")
        if version is None or crc32 != _crc32_of(content) or content["steps_done"] != steps_done:
            raise _DamagedError(f"{STATE} is damaged")
        for name, facts in content["files"].items():
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                raise _DamagedError(f"{name} has {size} bytes, wanted {facts['bytes']}")
            if _crc32(path / name) != facts["crc32"]:
                raise _DamagedError(f"{name} is damaged")
    except OSError as error:
        raise _DamagedError(f"{Path(error.filename or STATE).name}: {in_words(error)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{STATE} is damaged") from error
    state: dict[str, Any] = content["state"]
    return state


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _why(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, (OSError, SafetensorError)) else error
    words = in_words(cause)
    return "the disk is full" if "os error 28" in words or "No space left" in words else words


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
