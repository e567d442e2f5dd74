"""Trains points and kills itself: ``python -m tests.train.killed FOLDER WHERE STEP``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from regista.train import checkpoints
from tests.train.tasks import PointTask, train_points


def die() -> None:
    """As ``kill -9`` does: nothing is closed, nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, where: str, step: int) -> None:
    """Die before the loss of a step, or half-way through writing the checkpoint behind it."""
    torch.set_num_threads(1)
    if where == "loss":
        task = PointTask(before_loss=lambda now: die() if now == step else None)
    else:
        task = PointTask()
        write: Any = checkpoints._write_state

        def die_or_write(partial: Path, steps_done: int, state: Any) -> None:
            if steps_done == step:
                die()
            write(partial, steps_done, state)

        checkpoints._write_state = die_or_write
    train_points(Path(folder), task=task, checkpoint_every_steps=2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
