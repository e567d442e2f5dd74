"""What a training run writes down: lines in the run folder's log, and TensorBoard files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from regista.results import RunFolder, RunRecord
from regista.results.folder import LOG, RECORD
from regista.results.writing import in_words, write_whole

KIND = "training"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"


def open_run(run: RunFolder | str | Path, *, resume: bool) -> RunFolder:
    """A run folder to write into: the one given, or one made at a path.

    Raises:
        ValueError: see ``RunFolder.create``.
    """
    if isinstance(run, RunFolder):
        return run
    path = Path(run)
    if resume and (path / RECORD).exists():
        return RunFolder.open(path)  # whatever kind of run trains in there
    return RunFolder.create(path, KIND, resume=resume)


def onlooker(run: RunFolder | str | Path) -> RunFolder:
    """The same folder for a process that writes nothing."""
    if isinstance(run, RunFolder):
        return run
    return RunFolder(Path(run), RunRecord(KIND, datetime.now(timezone.utc).isoformat(timespec="seconds")))


class Journal:
    """Log lines ``{"event": "step" | "epoch" | "checkpoint" | ...}`` and the same as TensorBoard scalars.

    Args:
        run: Where they go.
        steps_done: Steps of the checkpoint that the run goes on from: lines about later ones go.
        epochs_done: The same for epochs.
        active: False in all processes but the first, which alone writes.
    """

    def __init__(self, run: RunFolder, *, steps_done: int = 0, epochs_done: int = 0, active: bool = True) -> None:
        self.run = run
        self.active = active
        self._writer: Any = None
        if not active:
            return
        _forget(run.path / LOG, steps_done, epochs_done)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = self._try(lambda: SummaryWriter(str(run.path / TENSORBOARD), purge_step=steps_done))

    def event(self, name: str, **values: Any) -> None:
        """A line in the log alone."""
        if self.active:
            self.run.log(name, **values)

    def scalars(self, name: str, at: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """A line in the log with ``values`` and ``facts``, and each value as a scalar "name/value"."""
        if not self.active:
            return
        self.run.log({"event": name, **facts, **values})

        def write() -> None:
            for key, value in values.items():
                self._writer.add_scalar(f"{name}/{key}", value, at)

        self._try(write)

    def flush(self) -> None:
        """Bring what was written to disk."""
        if self._writer is not None:
            self._try(self._writer.flush)

    def close(self) -> None:
        """Close the TensorBoard file."""
        if self._writer is not None:
            self._try(self._writer.close)
            self._writer = None

    def _try(self, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except OSError as error:
            raise ValueError(f"cannot write {self.run.path / TENSORBOARD}: {in_words(error)}") from error


def _forget(path: Path, steps_done: int, epochs_done: int) -> None:
    """Take out of a log what happened after a checkpoint; lines of others stay as they are."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"cannot read {path}: {in_words(error)}") from error
    kept = [line for line in lines if _stays(line, steps_done, epochs_done)]
    if kept != lines:
        text = "".join(f"{line}\n" for line in kept)
        write_whole(path, lambda partial: _write_text(partial, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _stays(line: str, steps_done: int, epochs_done: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False  # cut short by a kill
    if not isinstance(entry, dict):
        return True
    event = entry.get("event")
    if event == "step":
        return int(entry.get("step", 0)) < steps_done
    if event == "epoch":
        return int(entry.get("epoch", 0)) < epochs_done
    if event == "checkpoint":
        return int(entry.get("steps_done", 0)) <= steps_done
    return event != "end"
