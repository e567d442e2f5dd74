"""Settings of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("auto", "fp32", "bf16")
SCHEDULES = ("constant", "linear", "cosine", "exponential-epochs")
# What may differ between a run and its continuation: it changes no weight.
FREE = (
    "num_workers",
    "checkpoint_every_steps",
    "checkpoint_every_epochs",
    "keep",
    "max_steps",
    "log_every",
    "evaluate_every",
    "device",
    "find_unused_parameters",
)


@dataclass(frozen=True)
class TrainConfig:
    """How to train; what is trained is the task's business.

    Attributes:
        epochs: Passes over the data; the schedule runs over all of them.
        batch_size: Images of one forward pass on one device. A step sees batch_size *
            gradient_accumulation * processes images.
        lr, end_lr: Learning rate at the start (after the warm-up) and at the end.
        weight_decay, betas: Of AdamW, on every parameter unless its group says otherwise; for
            "sgd" the first beta is the momentum.
        optimizer: One of ``OPTIMIZERS``.
        schedule: One of ``SCHEDULES``; see ``regista.train.schedules``.
        warmup_epochs: Linear rise from lr / steps to lr over that many epochs; fractions are fine.
        gradient_accumulation: Forward passes summed before a step.
        clip_grad_norm: Longest gradient (L2 norm over all parameters), None for no limit.
        precision: "fp32", "bf16" (autocast; the weights stay float32) or "auto": bf16 on a CUDA
            device that computes it natively, else fp32.
        device: "auto", "cpu", "cuda" or "mps".
        num_workers: Processes that load data; 0 loads in this one. The data are the same.
        seed: Of the order of the data, of augmentation and of dropout.
        shuffle: A new order each epoch.
        drop_last: Leave out the images that do not fill a whole step at the end of an epoch.
        checkpoint_every_steps, checkpoint_every_epochs: When to write a checkpoint; None for never.
            One is always written at the end.
        keep: How many checkpoints to keep, None for all.
        max_steps: Stop after so many steps in all; the schedule is as without.
        log_every: Steps between two lines in the log. NaN and infinity are looked for at every
            step, but on an accelerator only every so many steps, before a line is written.
        evaluate_every: Epochs between two evaluations; the last epoch always has one. 0 for never.
        find_unused_parameters: For training on several devices, where some parameters get no
            gradient at some steps.

    Raises:
        ValueError: naming the setting, what it was and what it may be.
    """

    epochs: int = 1
    batch_size: int = 8
    lr: float = 1e-4
    end_lr: float = 0.0
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    optimizer: str = "adamw"
    schedule: str = "constant"
    warmup_epochs: float = 0.0
    gradient_accumulation: int = 1
    clip_grad_norm: float | None = None
    precision: str = "auto"
    device: str = "auto"
    num_workers: int = 0
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    checkpoint_every_steps: int | None = None
    checkpoint_every_epochs: int | None = 1
    keep: int | None = 2
    max_steps: int | None = None
    log_every: int = 1
    evaluate_every: int = 1
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "gradient_accumulation", "log_every"):
            _whole(name, getattr(self, name), 1)
        for name in ("num_workers", "seed", "evaluate_every"):
            _whole(name, getattr(self, name), 0)
        for name in ("checkpoint_every_steps", "checkpoint_every_epochs", "keep", "max_steps"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        for name in ("shuffle", "drop_last", "find_unused_parameters"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
        for name in ("lr", "end_lr", "weight_decay", "warmup_epochs"):
            _number(name, getattr(self, name))
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("device", self.device, ("auto", "cpu", "cuda", "mps"))
        if self.lr == 0:
            raise ValueError("lr is 0: nothing would be learnt; wanted a number above 0")
        if self.clip_grad_norm is not None:
            _number("clip_grad_norm", self.clip_grad_norm)
            if self.clip_grad_norm == 0:
                raise ValueError("clip_grad_norm is 0, which stops all learning; None is for no limit")
        object.__setattr__(self, "betas", _betas(self.betas))
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.schedule != "constant" and self.end_lr > self.lr:
            raise ValueError(f"end_lr {self.end_lr} is above lr {self.lr}; the {self.schedule} schedule falls")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs} is longer than the {self.epochs} epochs of the run")
        if self.schedule == "exponential-epochs" and (self.end_lr == 0 or self.warmup_epochs):
            raise ValueError(
                f"the exponential-epochs schedule needs an end_lr above 0 and has no warm-up, got end_lr "
                f"{self.end_lr} and warmup_epochs {self.warmup_epochs}; cosine and linear take both"
            )

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the weights; a resumed run must have the same."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in FREE}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number of {least} or more, got {value!r}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is a number of 0 or more, got {value!r}")


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")


def _betas(value: Any) -> tuple[float, float]:
    try:
        first, second = (float(beta) for beta in value)
    except (TypeError, ValueError):
        first = second = -1.0
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"betas are two numbers from 0 to below 1, got {value!r}")
    return first, second
