"""Trains points in every process of a launcher: ``torchrun ... -m tests.train.several FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed

from tests.train.tasks import Points, PointTask, train_points


def main(folder: str) -> None:
    """Stop within the second epoch, then go on with another task to the end."""
    torch.set_num_threads(1)
    for max_steps in (5, None):
        task = PointTask(Points(21), dropout=0.0)  # 21 items: one process has none in the last part
        train_points(Path(folder), task=task, resume=True, max_steps=max_steps, checkpoint_every_steps=2)
    torch.save(task.weights(), Path(folder) / f"weights-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
