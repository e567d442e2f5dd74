"""Learning rates as functions of the step: no state, so nothing to save or to lose."""

from __future__ import annotations

import math
from collections.abc import Callable

from regista.train.config import TrainConfig

Schedule = Callable[[int], float]


def make_schedule(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """The learning rate of each step, counted from 0 over the whole run.

    - "constant": lr.
    - "linear", "cosine": from lr down to end_lr, which would be reached one step after the last.
    - "exponential-epochs": lr_e = max(end_lr, lr * (end_lr / lr) ^ ((e + 1) / epochs) in epoch e
      from 0, written after each step: the very first step uses lr, and the first step of every
      later epoch still the value of the epoch before (released code of PH-Reg, 2505.21501).

    Before that, all but the last rise linearly over ``warmup_epochs``: lr / w, 2 lr / w, ... lr.

    Raises:
        ValueError: if an epoch has no step.
    """
    if steps_per_epoch < 1:
        raise ValueError(f"an epoch has {steps_per_epoch} steps; wanted 1 or more")
    if config.schedule == "exponential-epochs":
        return lambda step: _exponential(config, step, steps_per_epoch)
    total = config.epochs * steps_per_epoch
    warmup = round(config.warmup_epochs * steps_per_epoch)

    def rate(step: int) -> float:
        if step < warmup:
            return config.lr * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return _SHAPES[config.schedule](config.lr, config.end_lr, done)

    return rate


def epoch_rate(lr: float, end_lr: float, epoch: int, epochs: int) -> float:
    """Value of "exponential-epochs" for an epoch, counted from 0."""
    value: float = lr * (end_lr / lr) ** ((epoch + 1) / epochs)
    return max(end_lr, value)


def _exponential(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    if step == 0:
        return config.lr
    written_in = (step - 1) // steps_per_epoch  # the step before wrote the value
    return epoch_rate(config.lr, config.end_lr, written_in, config.epochs)


def _constant(lr: float, _end: float, _done: float) -> float:
    return lr


def _linear(lr: float, end: float, done: float) -> float:
    return lr + (end - lr) * done


def _cosine(lr: float, end: float, done: float) -> float:
    return end + (lr - end) * (1 + math.cos(math.pi * done)) / 2


_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
