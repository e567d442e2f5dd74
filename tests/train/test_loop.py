"""The loop against hand-written steps, and what it leaves behind."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regista.results import RunFolder
from regista.train import TrainConfig, train
from regista.train.rng import random_state
from regista.train.schedules import make_schedule
from tests.tolerances import assert_close
from tests.train.tasks import Points, PointTask, lines, same_weights, settings, train_points


def test_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    task, plain = PointTask(Points(noise=0.0), dropout=0.0), PointTask(Points(noise=0.0), dropout=0.0)
    config = settings(shuffle=False, clip_grad_norm=0.5, weight_decay=0.1, betas=(0.8, 0.95))
    train(task, config, tmp_path / "run")
    rates = make_schedule(config, 6)
    optimizer = torch.optim.AdamW(plain.rest.parameters(), betas=(0.8, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(18):
        where = torch.arange(22).split(4)[step % 6].tolist()
        x, y = (torch.stack(values) for values in zip(*(plain.data[index] for index in where), strict=True))
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        optimizer.zero_grad()
        loss = plain.loss((x, y), step=step, epoch=step // 6)["loss"]
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(plain.rest.parameters(), 0.5).item())
        optimizer.step()
    written = lines(tmp_path / "run")
    assert [line["loss"] for line in written] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in written] == pytest.approx(norms, rel=1e-4)
    assert [line["lr"] for line in written] == [rates(step) for step in range(18)]
    for got, wanted in zip(task.rest.parameters(), plain.rest.parameters(), strict=True):
        assert_close(got, wanted)
    assert max(norms) > 0.5  # the limit was in force


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 8), (2, 4), (3, 3), (4, 2)])
def test_accumulation_equals_the_big_batch(tmp_path: Path, batch_size: int, accumulation: int) -> None:
    """22 images: the last step, of 6 or 4, is not full, nor is its last part."""
    size = batch_size * accumulation
    parts, whole = PointTask(dropout=0.0), PointTask(dropout=0.0)
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.2}
    train_points(tmp_path / "a", task=parts, batch_size=batch_size, gradient_accumulation=accumulation, **options)
    train_points(tmp_path / "b", task=whole, batch_size=size, gradient_accumulation=1, **options)
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert len(a) == 3 * math.ceil(22 / size)
    for name in ("loss", "absolute", "grad_norm"):
        assert [line[name] for line in a] == pytest.approx([line[name] for line in b], abs=1e-6, rel=1e-6)
    for got, wanted in zip(parts.rest.parameters(), whole.rest.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_two_workers_train_the_same(tmp_path: Path) -> None:
    alone, two = PointTask(), PointTask()
    train_points(tmp_path / "a", task=alone)
    train_points(tmp_path / "b", task=two, num_workers=2)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert same_weights(alone.weights(), two.weights())


def test_frozen_parameters_keep_every_bit(tmp_path: Path) -> None:
    task = PointTask()
    before = task.weights()
    train_points(tmp_path / "run", task=task, weight_decay=0.5)
    after = task.weights()
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("first."), name
    assert all(parameter.grad is None for module in task.modules().values() for parameter in module.parameters())


def test_it_learns(tmp_path: Path) -> None:
    result = train_points(tmp_path / "run", task=PointTask(dropout=0.0), epochs=30)
    epochs = lines(tmp_path / "run", "epoch")
    assert result.terms["loss"] < 0.3 * epochs[0]["loss"]
    assert (result.steps, result.epochs, result.resumed_from) == (180, 30, None)


def test_an_epoch_line_has_the_mean_over_items(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def on_epoch(epoch: int, metrics: dict[str, float]) -> dict[str, float]:
        seen.append(metrics)
        return {"extra": float(epoch)}

    result = train(PointTask(), settings(), tmp_path / "run", on_epoch=on_epoch)
    steps, epochs = lines(tmp_path / "run"), lines(tmp_path / "run", "epoch")
    sizes = [4, 4, 4, 4, 4, 2]
    for epoch, line in enumerate(epochs):
        mine = [step["loss"] for step in steps if step["epoch"] == epoch]
        assert line["loss"] == pytest.approx(sum(s * v for s, v in zip(sizes, mine, strict=True)) / 22)
        assert line["extra"] == epoch
        assert line["at_one"] == seen[epoch]["at_one"]
    assert result.metrics == {"at_one": epochs[-1]["at_one"], "extra": 2.0}
    assert result.terms["loss"] == epochs[-1]["loss"]


def test_evaluation_changes_no_number(tmp_path: Path) -> None:
    train_points(tmp_path / "a")
    train_points(tmp_path / "b", evaluate_every=0)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    train_points(tmp_path / "c", evaluate_every=2)
    assert ["at_one" in line for line in lines(tmp_path / "c", "epoch")] == [False, True, True]


def test_the_world_is_left_as_it_was(tmp_path: Path) -> None:
    task = PointTask()
    task.rest.eval()
    task.first.train()
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)  # noqa: NPY002
    before = random_state()
    train_points(tmp_path / "run", task=task)
    assert all(torch.equal(before[key], value) for key, value in random_state().items())
    assert not any(module.training for module in task.rest.modules())
    assert task.first.training


def test_the_run_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls: list[tuple[int, int]] = []
    train(PointTask(), settings(), tmp_path / "run", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 18) for done in range(1, 19)]
    run = RunFolder.open(tmp_path / "run")
    assert run.record.kind == "training"
    assert run.record.config["lr"] == 0.05
    assert run.record.seed == 4
    assert run.record.metrics["at_one"] == lines(tmp_path / "run", "epoch")[-1]["at_one"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    scalars = events.Scalars("step/loss")  # type: ignore[no-untyped-call]
    assert [entry.value for entry in scalars] == pytest.approx([line["loss"] for line in lines(tmp_path / "run")])
    assert len(events.Scalars("epoch/at_one")) == 3  # type: ignore[no-untyped-call]


def test_lines_every_so_many_steps(tmp_path: Path) -> None:
    train_points(tmp_path / "a")
    train_points(tmp_path / "b", log_every=5)
    every = lines(tmp_path / "a")
    assert lines(tmp_path / "b") == [every[step] for step in (0, 5, 10, 15)]
    assert lines(tmp_path / "a", "epoch") == lines(tmp_path / "b", "epoch")


class BadTask(PointTask):
    """A term that is no number at one step."""

    def __init__(self, term: str, value: float, at: int) -> None:
        super().__init__()
        self.term, self.value, self.at = term, value, at

    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        terms = super().loss(batch, step=step, epoch=epoch)
        if step == self.at:
            terms[self.term] = terms[self.term] * self.value
        return terms


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("term", ["loss", "absolute"])
def test_a_loss_that_is_no_number_is_named(tmp_path: Path, term: str, value: float) -> None:
    task = BadTask(term, value, at=8)
    with pytest.raises(ValueError, match=rf"loss term '{term}' is {value} at step 8, epoch 1 "):
        train_points(tmp_path / "run", task=task, checkpoint_every_steps=4)
    assert all(torch.isfinite(weight).all() for weight in task.weights().values())
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(8))


class BadGradient(PointTask):
    """A finite loss with an infinite slope."""

    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        terms = super().loss(batch, step=step, epoch=epoch)
        weight: Any = self.rest[0].weight
        return {**terms, "loss": terms["loss"] + (weight * 0).abs().sqrt().sum()}


def test_a_gradient_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"length of the gradient is nan at step 0, epoch 0"):
        train_points(tmp_path / "run", task=BadGradient())


def test_an_evaluation_that_gives_no_number_is_named(tmp_path: Path) -> None:
    def on_epoch(epoch: int, _metrics: dict[str, float]) -> dict[str, float]:
        return {"quality": math.nan if epoch == 1 else 1.0}

    with pytest.raises(ValueError, match=r"after epoch 1 .* quality is nan"):
        train(PointTask(), settings(), tmp_path / "run", on_epoch=on_epoch)


def test_bf16_only_when_asked_on_a_cpu(tmp_path: Path) -> None:
    kinds = []

    class Watching(PointTask):
        def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
            kinds.append(self.rest(self.first(batch[0])).dtype)
            return super().loss(batch, step=step, epoch=epoch)

    task = Watching()
    train_points(tmp_path / "a", task=task, max_steps=1)
    train_points(tmp_path / "b", task=task, max_steps=1, precision="bf16")
    assert kinds == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(weight.dtype == torch.float32 for weight in task.weights().values())


def test_settings_of_a_launcher_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_points(tmp_path / "a")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train_points(tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_an_accelerator_from_before_does_not_count(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    train_points(tmp_path / "a")
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True, mixed_precision="bf16")
    train_points(tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


def test_lr_scale_and_after_step(tmp_path: Path) -> None:
    class Scaled(PointTask):
        after: list[tuple[int, int]] = []

        def parameter_groups(self) -> list[dict[str, Any]]:
            first, last = self.rest[0], self.rest[3]
            assert isinstance(first, nn.Module)
            assert isinstance(last, nn.Module)
            return [
                {"params": first.parameters(), "lr_scale": 0.0, "weight_decay": 0.0},
                {"params": last.parameters()},
            ]

        def after_step(self, step: int, epoch: int) -> None:
            self.after.append((step, epoch))

    task = Scaled()
    before = task.weights()
    train_points(tmp_path / "run", task=task)
    changed = {name for name, value in task.weights().items() if not torch.equal(value, before[name])}
    assert changed == {"rest.3.weight", "rest.3.bias"}
    assert task.after == [(step, step // 6) for step in range(18)]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda task: [], "nothing would be trained"),
        (lambda task: [{"params": task.first.parameters()}], "frozen .* first.weight"),
        (lambda task: [{"params": task.rest[0].parameters()}], "stand in no group; .*rest.3"),
        (lambda task: [{"params": [*task.rest.parameters()]}, {"params": [task.rest[0].bias]}], "more than once"),
        (lambda task: [{"params": [nn.Parameter(torch.ones(1))]}], r"none of modules\(\)"),
    ],
)
def test_wrong_groups_are_named(tmp_path: Path, groups: Any, words: str) -> None:
    task = PointTask()
    task.parameter_groups = lambda: groups(task)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=words):
        train_points(tmp_path / "run", task=task)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (lambda loss: {"total": loss}, "a term 'loss'"),
        (lambda loss: {"loss": loss.expand(2)}, "scalars"),
        (lambda loss: {"loss": loss, "part": 1.0}, "scalars"),
        (lambda loss: {"loss": loss.detach()}, "does not depend"),
        (lambda loss: {"loss": loss, "grad_norm": loss}, "grad_norm"),
    ],
)
def test_wrong_terms_are_named(tmp_path: Path, terms: Any, words: str) -> None:
    class Wrong(PointTask):
        def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
            found: dict[str, Tensor] = terms(super().loss(batch, step=step, epoch=epoch)["loss"])
            return found

    with pytest.raises(ValueError, match=words):
        train_points(tmp_path / "run", task=Wrong())


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    class NoModules(PointTask):
        def modules(self) -> dict[str, nn.Module]:
            return {"a.b": self.rest}

    with pytest.raises(ValueError, match=r"plain names; wrong: \['a\.b'\]"):
        train_points(tmp_path / "x", task=NoModules())
    assert not (tmp_path / "x").exists()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' is asked for"):
            train(PointTask(), TrainConfig(device="cuda"), tmp_path / "y")
    train_points(tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match="holds a run already"):
        train_points(tmp_path / "run")
    with pytest.raises(ValueError, match="holds checkpoints already"):
        train(PointTask(), settings(), RunFolder.open(tmp_path / "run"))
