"""Tiny tasks to train: a few parameters, augmentation, dropout and a frozen layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from regista.train import SeededDataset, TrainConfig, TrainingTask, TrainResult, item_generator, train

WIDTH = 3


class Points(SeededDataset):
    """x with noise of the epoch and index; y a fixed function of x without noise."""

    def __init__(self, length: int = 22, noise: float = 0.1) -> None:
        self.x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(11))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def item(self, index: int, *, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(WIDTH, generator=item_generator(index, epoch=epoch, seed=seed))
        return self.x[index] + self.noise * noise, self.x[index].sum().sin()


class GlobalRandomPoints(Dataset[Any]):
    """A dataset of the usual kind, whose augmentation draws from the global generators."""

    def __init__(self, length: int = 22) -> None:
        self.inner = Points(length)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(WIDTH) + 0.1 * float(np.random.rand()), y  # noqa: NPY002


class PointTask(TrainingTask):
    """Fits ``Points`` with two layers; the one before them is frozen.

    Args:
        dropout: Uses the global generator of torch.
        before_loss: Called with the step before each loss.
    """

    def __init__(
        self,
        data: Dataset[Any] | None = None,
        *,
        dropout: float = 0.2,
        hidden: int = 5,
        before_loss: Callable[[int], None] | None = None,
    ) -> None:
        generator_state = torch.get_rng_state()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.rest = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        torch.set_rng_state(generator_state)
        self.data = data if data is not None else Points()
        self.before_loss = before_loss
        self.seen: list[Tensor] = []

    def modules(self) -> dict[str, nn.Module]:
        return {"first": self.first, "rest": self.rest}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.rest.parameters())}]

    def dataset(self) -> Dataset[Any]:
        return self.data

    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        if self.before_loss is not None:
            self.before_loss(step)
        x, y = batch
        self.seen.append(x)
        error = self.rest(self.first(x)).squeeze(-1) - y
        return {"loss": error.square().mean() + 0.1 * error.abs().mean(), "absolute": error.abs().mean()}

    def evaluate(self, epoch: int) -> dict[str, float]:
        self.rest.eval()
        torch.rand(7)  # an evaluation may draw random numbers
        with torch.no_grad():
            x = torch.ones(2, WIDTH)
            return {"at_one": float(F.mse_loss(self.rest(self.first(x)), torch.zeros(2, 1)))}

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in nn.ModuleDict(self.modules()).state_dict().items()}


def settings(**changes: Any) -> TrainConfig:
    """Three epochs of six steps, the last one smaller, on the CPU."""
    values: dict[str, Any] = {
        "epochs": 3, "batch_size": 2, "gradient_accumulation": 2, "lr": 0.05, "end_lr": 0.01,
        "schedule": "cosine", "warmup_epochs": 0.5, "device": "cpu", "seed": 4,
    }  # fmt: skip
    return TrainConfig(**{**values, **changes})


def train_points(folder: Path, *, resume: bool = False, task: PointTask | None = None, **changes: Any) -> TrainResult:
    return train(task or PointTask(), settings(**changes), folder, resume=resume)


def lines(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    """Lines of the log of one kind, without times."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    drop = ("time", "seconds")
    return [{k: v for k, v in entry.items() if k not in drop} for entry in entries if entry["event"] == event]


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
