"""Two processes train what one does with batches of twice the size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.tasks import Points, PointTask, lines, same_weights, train_points

ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tests.train.several"]
    command = [sys.executable, *launcher, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    alone = PointTask(Points(21), dropout=0.0)
    train_points(tmp_path / "one", task=alone, batch_size=4)
    launch(tmp_path / "two")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in two] == list(range(9))
    for name in ("loss", "absolute", "grad_norm", "lr"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5)
    first, second = (torch.load(tmp_path / "two" / f"weights-{rank}.pt", weights_only=True) for rank in range(2))
    assert same_weights(first, second)
    for name, value in alone.weights().items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-6)
    starts = lines(tmp_path / "two", "start")
    assert [line["steps_done"] for line in starts] == [0, 5]
    with pytest.raises(ValueError, match="processes was 2, is 1"):
        train_points(tmp_path / "two", task=PointTask(Points(21), dropout=0.0), resume=True)
