"""Distillation of patch features: a student learns given or computed targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from regista.backbones.base import Backbone
from regista.losses.distillation import distillation_loss
from regista.train.task import TrainingTask

Targets = Callable[[Tensor], Tensor]
Patches = Callable[[Backbone, Tensor], Tensor]
Metrics = Callable[[Backbone, Tensor], dict[str, float]]


class DistilTask(TrainingTask):
    """Trains some parameters of a student so that its patch features become the targets.

    Args:
        student: Its module is trained in place, in evaluation mode (no dropout, no stochastic depth), as
            the targets were made.
        data: Items (image (3, H, W), target (P, D)), or images alone with ``targets``.
        trained: {name in the module: parameter}; all others are frozen while training.
        held_out: Items (image, target) to be judged on.
        targets: (B, 3, H, W) -> (B, P, D), computed at each step without gradients.
        student_patches: (student, images) -> (B, P, D); its patch tokens after the final norm by default.
        mse_scale: Of the loss, see ``regista.losses.distillation``.
        metrics: (student, images) -> {name: mean over the images} of held-out batches.
        batch_size: Of the evaluation.
        settings: More that decides the result, for the check on resuming.
    """

    def __init__(
        self,
        student: Backbone,
        data: Dataset[Any],
        trained: Mapping[str, nn.Parameter],
        *,
        held_out: Dataset[Any] | None = None,
        targets: Targets | None = None,
        student_patches: Patches | None = None,
        mse_scale: float = 1.0,
        metrics: Metrics | None = None,
        batch_size: int = 8,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.student = student
        self.data = data
        self.trained = dict(trained)
        self.held_out = held_out
        self.targets = targets
        self.student_patches = student_patches or normed_patches
        self.mse_scale = mse_scale
        self.metrics = metrics
        self.batch_size = batch_size
        self.more_settings = dict(settings or {})

    def modules(self) -> dict[str, nn.Module]:
        """The student's module."""
        return {"student": self.student.module}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """One group of what is trained."""
        return [{"params": list(self.trained.values())}]

    def dataset(self) -> Dataset[Any]:
        """The training data."""
        return self.data

    def check(self) -> None:
        """Raise ``ValueError`` if nothing is trained, or there are no images."""
        if not self.trained:
            raise ValueError(f"{self.student.name}: no parameter is to be trained")
        if not len(cast(Sized, self.data)):
            raise ValueError("there is no image to train on")

    def settings(self) -> dict[str, Any]:
        """What is trained, and the weight of the loss."""
        return {"trained": sorted(self.trained), "mse_scale": self.mse_scale, **self.more_settings}

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Freeze all but what is trained; given back on exit."""
        chosen = {id(parameter) for parameter in self.trained.values()}
        before = [(parameter, parameter.requires_grad) for parameter in self.student.module.parameters()]
        try:
            for parameter, _ in before:
                parameter.requires_grad_(id(parameter) in chosen)
            yield
        finally:
            for parameter, wanted in before:
                parameter.requires_grad_(wanted)

    def train_mode(self) -> None:
        """The student stays in evaluation mode."""
        self.student.module.eval()

    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        """1 - mean cosine + mse_scale * MSE to the targets (2505.21501)."""
        images, target = self._with_target(batch)
        terms = distillation_loss(self.student_patches(self.student, images), target, mse_scale=self.mse_scale)
        return {"loss": terms.loss, "cosine": terms.cosine, "mse": terms.mse}

    @torch.no_grad()
    def evaluate(self, epoch: int) -> dict[str, float]:
        """On held-out images: loss, mean cosine to the target, and the metrics."""
        if self.held_out is None:
            return {}
        sums: dict[str, float] = {}
        count = 0
        for images, target in DataLoader(self.held_out, batch_size=self.batch_size):
            pixels = images.to(self.student.device)
            terms = distillation_loss(self.student_patches(self.student, pixels), target, mse_scale=self.mse_scale)
            values = {"loss": float(terms.loss), "cosine": 1 - float(terms.cosine), "mse": float(terms.mse)}
            values |= {} if self.metrics is None else self.metrics(self.student, pixels)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * len(images)
            count += len(images)
        return {f"held_out_{name}": value / count for name, value in sums.items()}

    def _with_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        if self.targets is None:
            images, target = batch
            return images, target
        with torch.no_grad():
            return batch, self.targets(batch)


def normed_patches(student: Backbone, images: Tensor) -> Tensor:
    """Patch tokens after the final norm: (B, 3, H, W) -> (B, P, D)."""
    return student(images).patches
