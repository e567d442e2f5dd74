"""A run that was killed and goes on gives the numbers of one that ran through."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regista.results import RunFolder
from regista.train import train
from tests.train.tasks import GlobalRandomPoints, Points, PointTask, lines, same_weights, settings, train_points

ROOT = Path(__file__).resolve().parents[2]


class Killed(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


def stopping_at(step: int, **options: Any) -> PointTask:
    def stop(now: int) -> None:
        if now == step:
            raise Killed

    return PointTask(before_loss=stop, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[PointTask, Path]:
    """A run of 18 steps that was never stopped."""
    folder, task = tmp_path_factory.mktemp("whole") / "run", PointTask()
    train_points(folder, task=task)
    return task, folder


def assert_as_whole(task: PointTask, folder: Path, whole: tuple[PointTask, Path]) -> None:
    """Same weights and same lines, each once, bit by bit."""
    assert same_weights(task.weights(), whole[0].weights())
    for event in ("step", "epoch", "end"):
        assert lines(folder, event) == lines(whole[1], event)
    assert [line["step"] for line in lines(folder)] == list(range(18))


@pytest.mark.parametrize(("where", "step"), [("loss", 9), ("checkpoint", 10)])
def test_killed_for_real(tmp_path: Path, whole: tuple[PointTask, Path], where: str, step: int) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.train.killed", str(folder), where, str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(lines(folder)) >= 9  # in the middle of the second epoch
    task = PointTask()
    result = train_points(folder, task=task, resume=True, checkpoint_every_steps=2)
    assert result.resumed_from == 8
    assert_as_whole(task, folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize("step", range(18))
def test_stopped_at_any_step(tmp_path: Path, whole: tuple[PointTask, Path], step: int) -> None:
    with pytest.raises(Killed):
        train_points(tmp_path / "run", task=stopping_at(step), checkpoint_every_steps=1)
    task = PointTask()
    result = train_points(tmp_path / "run", task=task, resume=True)
    assert result.resumed_from == (step or None)
    assert_as_whole(task, tmp_path / "run", whole)
    assert result.terms == {
        key: value for key, value in lines(whole[1], "epoch")[-1].items() if key in ("loss", "absolute", "grad_norm")
    }


def test_stopped_three_times(tmp_path: Path, whole: tuple[PointTask, Path]) -> None:
    for step in (4, 5, 16):
        with pytest.raises(Killed):
            train_points(tmp_path / "run", task=stopping_at(step), resume=True, checkpoint_every_steps=3)
    task = PointTask()
    assert train_points(tmp_path / "run", task=task, resume=True).resumed_from == 15
    assert_as_whole(task, tmp_path / "run", whole)


def test_stopped_before_any_checkpoint(tmp_path: Path, whole: tuple[PointTask, Path]) -> None:
    with pytest.raises(Killed):
        train_points(tmp_path / "run", task=stopping_at(3))
    assert len(lines(tmp_path / "run")) == 3
    task = PointTask()
    assert train_points(tmp_path / "run", task=task, resume=True).resumed_from is None
    assert_as_whole(task, tmp_path / "run", whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_other_packages(tmp_path: Path, workers: int) -> None:
    through = PointTask(GlobalRandomPoints())
    train_points(tmp_path / "a", task=through)
    with pytest.raises(Killed):
        train_points(tmp_path / "b", task=stopping_at(8, data=GlobalRandomPoints()), checkpoint_every_steps=1)
    task = PointTask(GlobalRandomPoints())
    train_points(tmp_path / "b", task=task, resume=True, num_workers=workers)
    assert lines(tmp_path / "b") == lines(tmp_path / "a")
    assert same_weights(task.weights(), through.weights())


def test_sgd_goes_on_too(tmp_path: Path) -> None:
    through = PointTask()
    train_points(tmp_path / "a", task=through, optimizer="sgd")
    with pytest.raises(Killed):
        train_points(tmp_path / "b", task=stopping_at(8), optimizer="sgd", checkpoint_every_steps=2)
    task = PointTask()
    train_points(tmp_path / "b", task=task, optimizer="sgd", resume=True)
    assert same_weights(task.weights(), through.weights())


def test_max_steps_stops_and_more_of_them_go_on(tmp_path: Path, whole: tuple[PointTask, Path]) -> None:
    first = train_points(tmp_path / "run", max_steps=8)
    assert (first.steps, first.epochs) == (8, 1)
    assert first.metrics
    assert lines(tmp_path / "run") == lines(whole[1])[:8]
    task = PointTask()
    train_points(tmp_path / "run", task=task, resume=True)
    assert_as_whole(task, tmp_path / "run", whole)


def test_a_finished_run_stays_as_it_is(tmp_path: Path, whole: tuple[PointTask, Path]) -> None:
    first = train_points(tmp_path / "run")
    task = PointTask()
    again = train_points(tmp_path / "run", task=task, resume=True)
    assert (again.steps, again.terms, again.metrics) == (18, first.terms, first.metrics)
    assert again.checkpoint == first.checkpoint
    assert_as_whole(task, tmp_path / "run", whole)


def test_lines_of_others_stay(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "fix")
    run.log("views", number=10)
    with pytest.raises(Killed):
        train(stopping_at(8), settings(checkpoint_every_steps=2), run)
    with (run.path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # cut short
    train(PointTask(), settings(), RunFolder.open(run.path), resume=True)
    entries = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    assert entries[0]["event"] == "views"
    assert [entry["steps_done"] for entry in entries if entry["event"] == "start"] == [0, 8]
    assert RunFolder.open(run.path).record.kind == "fix"


def test_tensorboard_has_no_step_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(Killed):
        train_points(tmp_path / "run", task=stopping_at(9), checkpoint_every_steps=4)
    train_points(tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    assert [entry.step for entry in events.Scalars("step/loss")] == list(range(18))  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after 4 steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train_points(folder, max_steps=4)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.1}, r"lr was 0\.05, is 0\.1"),
        ({"batch_size": 4}, "batch_size was 2, is 4"),
        ({"seed": 5}, "seed was 4, is 5"),
        ({"epochs": 4}, "epochs was 3, is 4"),
        ({"betas": (0.5, 0.9)}, r"betas\[0\] was 0\.9, is 0\.5"),
        ({"precision": "bf16"}, "precision was fp32, is bf16"),
        ({"optimizer": "sgd"}, "optimizer was adamw, is sgd"),
        ({"task": PointTask(hidden=6)}, r"rest\.0\.weight was float32 \[5, 4\], is float32 \[6, 4\]"),
        ({"task": PointTask(Points(21))}, "items was 22, is 21"),
    ],
)
def test_another_run_is_refused(stopped: Path, changes: dict[str, Any], words: str) -> None:
    before = (stopped / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=words):
        train_points(stopped, resume=True, **changes)
    assert (stopped / "log.jsonl").read_bytes() == before


def test_other_settings_of_the_task_are_refused(stopped: Path) -> None:
    class Other(PointTask):
        def settings(self) -> dict[str, Any]:
            return {"smoothing": 0.1}

    Other.__name__ = "PointTask"
    with pytest.raises(ValueError, match=r"task\.smoothing was absent, is 0\.1"):
        train_points(stopped, resume=True, task=Other())


def test_other_frozen_parameters_are_refused(stopped: Path) -> None:
    class Thawed(PointTask):
        def parameter_groups(self) -> list[dict[str, Any]]:
            return [{"params": [*self.first.parameters(), *self.rest.parameters()]}]

    Thawed.__name__ = "PointTask"
    task = Thawed()
    task.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"first\.weight was float32 \[4, 3\] frozen, is float32 \[4, 3\]"):
        train_points(stopped, resume=True, task=task)


def test_weights_given_do_not_count_when_it_goes_on(tmp_path: Path, whole: tuple[PointTask, Path]) -> None:
    train_points(tmp_path / "run", max_steps=7)
    task = PointTask()
    with torch.no_grad():
        for parameter in [*task.first.parameters(), *task.rest.parameters()]:
            parameter.add_(1)
    train_points(tmp_path / "run", task=task, resume=True)
    assert_as_whole(task, tmp_path / "run", whole)
