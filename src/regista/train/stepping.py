"""One step of the optimizer: forward passes, their gradients, and the numbers that come out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from regista.train.config import TrainConfig
from regista.train.optimizers import set_rate
from regista.train.task import TrainingTask

GRAD_NORM = "grad_norm"


class LossModule(nn.Module):
    """The whole loss of a task as one module, so that wrappers for several devices see its forward.

    Args:
        task: Its ``loss`` is the forward.
        modules: Become children.
        device_type: For autocast.
        bf16: Compute in bfloat16 where autocast does.
    """

    def __init__(self, task: TrainingTask, modules: Mapping[str, nn.Module], device_type: str, bf16: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(modules))
        self.device_type = device_type
        self.bf16 = bf16
        self._task = (task,)  # in a tuple: a task that is a module is no child

    def forward(self, batch: Any, step: int, epoch: int) -> dict[str, Tensor]:
        """The task's terms.

        Raises:
            ValueError: if they are not scalars with a "loss" that has gradients.
        """
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
            terms = self._task[0].loss(batch, step=step, epoch=epoch)
        if "loss" not in terms or GRAD_NORM in terms:
            raise ValueError(f"a task's loss gives a term 'loss' and none named {GRAD_NORM!r}, got {list(terms)}")
        wrong = [name for name, value in terms.items() if not isinstance(value, Tensor) or value.ndim]
        if wrong:
            raise ValueError(f"the terms of a loss are scalars (tensors without dimensions); wrong: {wrong}")
        if not terms["loss"].requires_grad:
            raise ValueError("the loss does not depend on any trained parameter")
        return dict(terms)


@dataclass(frozen=True)
class StepNumbers:
    """What one step gave.

    Attributes:
        step, epoch: From 0.
        rate: Learning rate.
        items: Of all processes.
        values: {term: mean over the items}, and the length of the gradient before it was clipped.
    """

    step: int
    epoch: int
    rate: float
    items: int
    values: dict[str, float]


@dataclass(frozen=True)
class _Pending:
    step: int
    epoch: int
    rate: float
    items: int
    names: tuple[str, ...]
    values: list[Tensor]


class Stepper:
    """Does steps; keeps their numbers on the device until ``numbers`` brings them over at once."""

    def __init__(
        self,
        accelerator: Accelerator,
        loss_module: nn.Module,
        optimizer: Optimizer,
        config: TrainConfig,
    ) -> None:
        self.accelerator = accelerator
        self.loss_module = loss_module
        self.optimizer = optimizer
        self.config = config
        self.at_once = accelerator.device.type == "cpu"  # nothing to wait for: look before the weights change
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._pending: list[_Pending] = []

    def step(self, parts: list[tuple[Any, float]], *, step: int, epoch: int, rate: float, items: int) -> None:
        """Sum the gradients of the parts by their shares, clip, and move the parameters.

        Raises:
            ValueError: on the CPU, for a term or a gradient that is NaN or infinite; the
                parameters are then as they were.
        """
        set_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for number, (batch, share) in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.loss_module):
                terms = self.loss_module(send_to_device(batch, self.accelerator.device), step, epoch)
                if self.at_once:
                    check_finite({name: value.item() for name, value in terms.items()}, step, epoch)
                self.accelerator.backward(terms["loss"] * share)
            for name, value in terms.items():
                weighted = value.detach().float() * share
                totals[name] = totals[name] + weighted if name in totals else weighted
        norm = self._clip()
        if self.at_once:
            check_finite({GRAD_NORM: norm.item()}, step, epoch)
        self.optimizer.step()
        values = [*(value / self.accelerator.num_processes for value in totals.values()), norm]
        self._pending.append(_Pending(step, epoch, rate, items, (*totals, GRAD_NORM), values))

    def numbers(self) -> list[StepNumbers]:
        """Numbers of the steps since the last call, averaged over the processes; the one place that waits.

        Raises:
            ValueError: naming the first term that was NaN or infinite, its step and epoch.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return []
        together = torch.stack([value.float() for entry in pending for value in entry.values])
        if self.accelerator.num_processes > 1:
            # the gradient is the same everywhere: its length is averaged, the terms' parts are summed
            is_norm = [name == GRAD_NORM for entry in pending for name in entry.names]
            scale = torch.tensor(is_norm, device=together.device).float() * (1 / self.accelerator.num_processes - 1) + 1
            together = self.accelerator.reduce(together * scale, "sum")
        flat = iter(together.tolist())
        found = []
        for entry in pending:
            values = dict(zip(entry.names, flat, strict=False))
            check_finite(values, entry.step, entry.epoch)
            found.append(StepNumbers(entry.step, entry.epoch, entry.rate, entry.items, values))
        return found

    def _clip(self) -> Tensor:
        longest = self.config.clip_grad_norm or float("inf")
        return torch.nn.utils.clip_grad_norm_(self._parameters, longest).detach()


def check_finite(values: Mapping[str, float], step: int, epoch: int) -> None:
    """Raise ``ValueError`` for the first number that is NaN or infinite, with its step and epoch."""
    for name, value in values.items():
        if not -float("inf") < value < float("inf"):
            what = "the length of the gradient" if name == GRAD_NORM else f"the loss term {name!r}"
            raise ValueError(
                f"{what} is {value} at step {step}, epoch {epoch} (counted from 0); no checkpoint holds it. "
                "Lower lr, set clip_grad_norm or precision fp32, or look for NaN in the data"
            )
