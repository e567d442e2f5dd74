"""The training loop: any task, one process or many, exact after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from torch import nn

from regista.results import RunFolder
from regista.train.agreement import check_agreement, run_facts
from regista.train.checkpoints import Checkpoint, CheckpointFolder
from regista.train.config import TrainConfig
from regista.train.device import make_accelerator, uses_bf16
from regista.train.journal import CHECKPOINTS, Journal, onlooker, open_run
from regista.train.optimizers import make_optimizer
from regista.train.outcome import Tally, TrainResult
from regista.train.rng import mixed_seed, preserved_randomness, seed_everything
from regista.train.sampling import Batches, Plan
from regista.train.schedules import make_schedule
from regista.train.state import (
    MODULES,
    OPTIMIZER,
    RANDOM,
    check_parameters,
    gathered_random_state,
    load_modules,
    load_optimizer,
    load_random_state,
    module_tensors,
    optimizer_tensors,
)
from regista.train.stepping import LossModule, Stepper
from regista.train.task import TrainingTask

Progress = Callable[[int, int], None]
NO_LIMIT = 2**63
OnEpoch = Callable[[int, dict[str, float]], "Mapping[str, float] | None"]


def train(
    task: TrainingTask,
    config: TrainConfig,
    run: RunFolder | str | Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    on_epoch: OnEpoch | None = None,
) -> TrainResult:
    """Train a task.

    Steps and epochs count from 0. The run folder gets ``log.jsonl`` (a line a step, an epoch, a
    checkpoint), ``tensorboard/`` and ``checkpoints/``. The modules stay on the device they were
    trained on, with their modes and ``requires_grad`` as before; the generators of random numbers
    too. A run that was killed at any step and goes on gives the numbers of one that ran through,
    bit by bit on a CPU.

    Args:
        task: What is trained.
        config: How.
        run: A run folder, or where to make one.
        resume: Go on from the newest whole checkpoint; begin if there is none.
        progress: Called with (steps done, steps in all) after each step.
        on_epoch: Called with (epoch, metrics) after each epoch in the first process; what it
            returns is logged with the metrics.

    Raises:
        ValueError: if the task does not check, the folder holds a run already, the checkpoint is
            of other settings (both values are named), a loss becomes NaN or infinite (term, step
            and epoch are named), or something cannot be written.
    """
    with ExitStack() as stack:
        stack.enter_context(preserved_randomness())
        task.check()
        stack.enter_context(task.prepared())
        modules = _checked_modules(task)
        stack.enter_context(_modes_kept(modules))
        accelerator = make_accelerator(config)
        folder = open_run(run, resume=resume) if accelerator.is_main_process else onlooker(run)
        loop = _Loop(task, config, modules, accelerator, folder, resume=resume)
        stack.callback(loop.close)
        own = accelerator.is_main_process and not isinstance(run, RunFolder)
        if own:
            folder.update(config=asdict(config), seed=config.seed)
        result = loop.run(progress, on_epoch)
        if own:
            folder.update(metrics={**result.terms, **result.metrics}, notes=result.notes)
        return result


class _Loop:
    """One training; made, run once, closed."""

    def __init__(
        self,
        task: TrainingTask,
        config: TrainConfig,
        modules: dict[str, nn.Module],
        accelerator: Accelerator,
        run: RunFolder,
        *,
        resume: bool,
    ) -> None:
        self.task, self.config, self.modules, self.accelerator = task, config, modules, accelerator
        process, processes = accelerator.process_index, accelerator.num_processes
        dataset = task.dataset()
        self.plan = Plan(len(cast(Sized, dataset)), config, process, processes)
        self.schedule = make_schedule(config, self.plan.steps_per_epoch)
        self.batches = Batches(dataset, self.plan, pin_memory=accelerator.device.type == "cuda")
        bf16 = uses_bf16(config.precision, accelerator.device)
        loss_module: nn.Module = accelerator.prepare(LossModule(task, modules, accelerator.device.type, bf16))
        self.optimizer, self.names = make_optimizer(task.parameter_groups(), modules, config)
        self.stepper = Stepper(accelerator, loss_module, self.optimizer, config)
        self.facts = run_facts(
            task, config, modules, self.optimizer, self.names,
            length=self.plan.length, processes=processes, bf16=bf16,
        )  # fmt: skip
        self.store = CheckpointFolder(run.path / CHECKPOINTS, config.keep)
        self.tally = Tally()
        seed_everything(mixed_seed(config.seed, process))
        checkpoint = self._find(resume)
        self.resumed_from = self._go_on_from(checkpoint) if checkpoint else None
        self.written = checkpoint.path if checkpoint else None
        done = self.tally.steps_done
        epochs_done = done // self.plan.steps_per_epoch
        self.journal = Journal(run, steps_done=done, epochs_done=epochs_done, active=accelerator.is_main_process)
        self.journal.event(
            "start",
            steps_done=done,
            steps=self.last_step,
            items=self.plan.length,
            device=str(accelerator.device),
            settings={**asdict(config), "precision": "bf16" if bf16 else "fp32"},
            notes=self.store.notes,
        )

    @property
    def last_step(self) -> int:
        """Steps in all, of whole epochs or up to ``max_steps``."""
        return min(self.config.max_steps or NO_LIMIT, self.config.epochs * self.plan.steps_per_epoch)

    def run(self, progress: Progress | None, on_epoch: OnEpoch | None) -> TrainResult:
        """Train from where the tally stands to the end."""
        while self.tally.steps_done < self.last_step:
            epoch, first = divmod(self.tally.steps_done, self.plan.steps_per_epoch)
            began = time.monotonic()
            self.task.train_mode()
            for step, parts in enumerate(self.batches.epoch(epoch, first), first):
                self._step(parts, step, epoch)
                if progress is not None:
                    progress(self.tally.steps_done, self.last_step)
                if self.tally.steps_done == self.last_step:
                    break
                if step < self.plan.steps_per_epoch - 1 and _due(
                    self.tally.steps_done, self.config.checkpoint_every_steps
                ):
                    self._save()
            self._collect()
            self._after(epoch, time.monotonic() - began, on_epoch)
        assert self.written is not None
        return TrainResult(
            self.tally.steps_done,
            self.tally.steps_done // self.plan.steps_per_epoch,
            dict(self.tally.terms),
            dict(self.tally.metrics),
            self.written,
            self.resumed_from,
            list(self.store.notes),
        )

    def close(self) -> None:
        """Close files and let the gradients go."""
        self.optimizer.zero_grad(set_to_none=True)
        self.journal.close()

    # One step and what follows ----------------------------------------------------------------

    def _step(self, parts: list[tuple[Any, float]], step: int, epoch: int) -> None:
        done = self.tally.steps_done
        rate = self.schedule(done)
        self.stepper.step(parts, step=done, epoch=epoch, rate=rate, items=self.plan.size(step))
        self.task.after_step(done, epoch)
        self.tally.steps_done += 1
        if self.stepper.at_once or _due(self.tally.steps_done, self.config.log_every):
            self._collect()

    def _collect(self) -> None:
        """Bring the numbers over, add them up, and write those that are due."""
        for numbers in self.stepper.numbers():
            self.tally.items += numbers.items
            for name, value in numbers.values.items():
                self.tally.sums[name] = self.tally.sums.get(name, 0.0) + value * numbers.items
            if numbers.step % self.config.log_every == 0:
                facts = {"step": numbers.step, "epoch": numbers.epoch}
                self.journal.scalars("step", numbers.step, {**numbers.values, "lr": numbers.rate}, facts)

    def _after(self, epoch: int, seconds: float, on_epoch: OnEpoch | None) -> None:
        """What follows the last step of an epoch, or of the run: evaluation, lines, a checkpoint."""
        done = self.tally.steps_done
        whole, at_end = done % self.plan.steps_per_epoch == 0, done == self.last_step
        metrics: dict[str, float] = {}
        if at_end or _due(epoch + 1, self.config.evaluate_every or None):
            metrics = self._evaluate(epoch) if self.config.evaluate_every else {}
        if whole:
            self.tally.terms = {name: value / self.tally.items for name, value in self.tally.sums.items()}
            self.tally.sums, self.tally.items = {}, 0
            if on_epoch is not None and self.accelerator.is_main_process:
                with preserved_randomness():
                    metrics |= _finite(on_epoch(epoch, dict(metrics)) or {}, epoch)
            values = {**self.tally.terms, **metrics}
            facts = {"epoch": epoch, "steps_done": done, "seconds": round(seconds, 3)}
            self.journal.scalars("epoch", epoch, values, facts)
        self.tally.metrics = metrics or self.tally.metrics
        epoch_due = _due(epoch + 1, self.config.checkpoint_every_epochs)
        if at_end or (whole and (epoch_due or _due(done, self.config.checkpoint_every_steps))):
            self._save()
        if at_end:
            self.journal.event("end", steps_done=done, metrics=self.tally.metrics)
            self.journal.flush()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        with preserved_randomness():
            return _finite(self.task.evaluate(epoch), epoch)

    # Checkpoints ------------------------------------------------------------------------------

    def _find(self, resume: bool) -> Checkpoint | None:
        if resume:
            return self.store.newest()
        if self.store.steps():
            raise ValueError(f"{self.store.path} holds checkpoints already; --resume (resume=True) goes on from them")
        return None

    def _go_on_from(self, checkpoint: Checkpoint) -> int:
        check_agreement(checkpoint.state["facts"], self.facts, str(checkpoint.path))
        load_modules(self.modules, checkpoint.tensors(MODULES), str(checkpoint.path))
        load_optimizer(self.optimizer, self.names, checkpoint.tensors(OPTIMIZER), checkpoint.state["optimizer"])
        load_random_state(checkpoint, self.accelerator.process_index)
        self.tally = Tally(**checkpoint.state["tally"])
        if self.accelerator.is_main_process:
            self.store.drop_after(checkpoint.steps_done)
        self.accelerator.wait_for_everyone()
        return self.tally.steps_done

    def _save(self) -> None:
        self._collect()
        random = gathered_random_state()
        if self.accelerator.is_main_process:
            check_parameters(self.modules, self.tally.steps_done - 1)
            moments, rest = optimizer_tensors(self.optimizer, self.names)
            tensors = {MODULES: module_tensors(self.modules), OPTIMIZER: moments, RANDOM: random}
            state = {"facts": self.facts, "optimizer": rest, "tally": asdict(self.tally)}
            self.written = self.store.save(self.tally.steps_done, tensors, state)
            self.journal.event("checkpoint", steps_done=self.tally.steps_done, file=self.written.name)
            self.journal.flush()
        self.accelerator.wait_for_everyone()
        self.written = self.store.path / f"step-{self.tally.steps_done:08d}"


def _due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0


def _finite(metrics: Mapping[str, float], epoch: int) -> dict[str, float]:
    values = {name: float(value) for name, value in metrics.items()}
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"the evaluation after epoch {epoch} (from 0) gave {', '.join(wrong)}")
    return values


def _checked_modules(task: TrainingTask) -> dict[str, nn.Module]:
    modules = task.modules()
    wrong = [name for name, module in modules.items() if not name.isidentifier() or not isinstance(module, nn.Module)]
    if wrong or not modules:
        raise ValueError(f"modules() of a task is {{name: module}} with plain names; wrong: {wrong or 'it is empty'}")
    return modules


@contextmanager
def _modes_kept(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Give every submodule its training or evaluation mode back."""
    before = [(child, child.training) for module in modules.values() for child in module.modules()]
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode
