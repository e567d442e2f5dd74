"""Distillation of patch features: a student learns what a target says of each patch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from regista.backbones.base import Backbone
from regista.losses.distillation import DistillationTerms, distillation_loss
from regista.train.config import TrainConfig
from regista.train.sampling import Batches, Plan
from regista.train.task import TrainingTask

Targets = Callable[[Tensor], Tensor]
ReadOut = Callable[[Backbone, Tensor], Tensor]
ExtraMetrics = Callable[[int], Mapping[str, float]]


def normed_patches(student: Backbone, images: Tensor) -> Tensor:
    """Patch features after the final norm: (B, 3, H, W) -> (B, P, D)."""
    return student(images).patches


class DistilTask(TrainingTask):
    """Trains some parameters of a backbone to give target patch features.

    Items of the data are preprocessed images (3, H, W) with their targets (P, D) and, if there
    is a third, a bool (P,) of the patches that count; or, with ``targets``, images alone or with
    that mask. The loss is ``regista.losses.distillation`` (PH-Reg, 2505.21501), a mean over the
    patches of a batch. The student runs in its own dtype, or under autocast as the run says.

    Args:
        student: Its module is changed in place.
        trainable: {name: parameter of student.module}. All others are frozen while the training
            lasts; every ``requires_grad`` is as before afterwards.
        data: Training data; all images of one size.
        targets: (B, 3, H, W) on the device -> (B, P, D), called without gradients.
        student_patches: How the student's patches are read, (B, P, D).
        mse_scale: Weight of the squared difference beside the cosine.
        held_out: Data of the same kind for ``evaluate``; their items are the same every time.
        batch_size: Images of one forward pass in ``evaluate``; changes no number.
        extra_metrics: Called with the epoch by ``evaluate``; gives further numbers.
        described: What else decides the result, as JSON has it (the number of views, say);
            a run that goes on must have the same.

    Raises:
        ValueError: for parameters that are none of the student's, or none at all.
    """

    def __init__(
        self,
        student: Backbone,
        trainable: Mapping[str, nn.Parameter],
        data: Dataset[Any],
        *,
        targets: Targets | None = None,
        student_patches: ReadOut = normed_patches,
        mse_scale: float = 1.0,
        held_out: Dataset[Any] | None = None,
        batch_size: int = 8,
        extra_metrics: ExtraMetrics | None = None,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        own = {id(parameter) for parameter in student.module.parameters()}
        strangers = [name for name, parameter in trainable.items() if id(parameter) not in own]
        if strangers or not trainable:
            raise ValueError(
                f"trainable is {{name: parameter of student.module}}; {strangers or 'it is empty'}"
                f"{' are none of it' if strangers else ', so nothing would be trained'}"
            )
        self.student = student
        self.trainable = dict(trainable)
        self.data = data
        self.targets = targets
        self.student_patches = student_patches
        self.mse_scale = mse_scale
        self.held_out = held_out
        self.batch_size = batch_size
        self.extra_metrics = extra_metrics
        self.described = dict(described or {})

    # What the loop asks for -------------------------------------------------------------------

    def modules(self) -> dict[str, nn.Module]:
        """The student's module."""
        return {"student": self.student.module}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All trainable parameters in one group; one that is named twice stands once."""
        return [{"params": list({id(parameter): parameter for parameter in self.trainable.values()}.values())}]

    def dataset(self) -> Dataset[Any]:
        """The training data."""
        return self.data

    def settings(self) -> dict[str, Any]:
        """The weight of the squares, whether targets are made on the way, and what was described."""
        return {"mse_scale": self.mse_scale, "targets_on_the_way": self.targets is not None, **self.described}

    def check(self) -> None:
        """Run the first item through student and loss.

        Raises:
            ValueError: for an empty dataset, items of another form, or targets of another shape
                than what the student gives.
        """
        for name, data in (("training", self.data), ("held-out", self.held_out)):
            if data is None:
                continue
            if not len(cast(Sized, data)):
                raise ValueError(f"the {name} data are empty")
            parts = next(_batches(data, 1))
            with torch.no_grad():
                images, target, valid = self._parts(parts)
                predicted = self.student_patches(self.student, images)
                if predicted.shape != target.shape:
                    raise ValueError(
                        f"the student gives {tuple(predicted.shape)} for the first item of the {name} data, the target "
                        f"is {tuple(target.shape)}; both are (B, P, D), patches of one image size"
                    )
                distillation_loss(predicted, target, mse_scale=self.mse_scale, valid=valid)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Freeze what is not trainable, let the student keep its training mode; both undone on exit."""
        parameters = list(self.student.module.parameters())
        flags = [parameter.requires_grad for parameter in parameters]
        chosen = {id(parameter) for parameter in self.trainable.values()}
        mode = self.student.training
        try:
            for parameter in parameters:
                parameter.requires_grad_(id(parameter) in chosen)
            self.student.training = True
            yield
        finally:
            self.student.training = mode
            for parameter, flag in zip(parameters, flags, strict=True):
                parameter.requires_grad_(flag)

    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        """The terms "loss", "cosine" (1 - mean cosine) and "mse" (not scaled).

        Raises:
            ValueError: what the student, the targets or the loss found wrong, with step and epoch.
        """
        try:
            return self._terms(batch)[0]._asdict()
        except ValueError as error:
            raise ValueError(f"{error} (at step {step}, epoch {epoch} of the training, counted from 0)") from error

    def evaluate(self, epoch: int) -> dict[str, float]:
        """On the held-out data: "held_out_loss", "held_out_cosine" (the mean cosine), "held_out_mse".

        In evaluation mode, without autocast; each patch that counts has the same weight, so the
        batch size changes nothing. And the extra metrics.
        """
        found: dict[str, float] = {}
        mode = self.student.training
        self.student.training = False
        try:
            if self.held_out is not None:
                found = self._held_out_terms(self.held_out)
            if self.extra_metrics is not None:
                with torch.no_grad():
                    found |= self.extra_metrics(epoch)
        finally:
            self.student.training = mode
        return found

    # Inside -----------------------------------------------------------------------------------

    def _held_out_terms(self, data: Dataset[Any]) -> dict[str, float]:
        sums, patches = torch.zeros(3, dtype=torch.float64), 0
        for batch in _batches(data, self.batch_size):
            with torch.no_grad():
                terms, count = self._terms(batch)
            sums += torch.stack(terms).double().cpu() * count
            patches += count
        loss, cosine, mse = (sums / patches).tolist()
        return {"held_out_loss": loss, "held_out_cosine": 1 - cosine, "held_out_mse": mse}

    def _terms(self, batch: Any) -> tuple[DistillationTerms, int]:
        """The loss of a batch, and how many patches it is a mean of."""
        images, target, valid = self._parts(batch)
        predicted = self.student_patches(self.student, images)
        terms = distillation_loss(predicted, target, mse_scale=self.mse_scale, valid=valid)
        if torch.is_grad_enabled() or valid is None:
            return terms, target.shape[0] * target.shape[1]
        return terms, int(valid.sum())

    def _parts(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Images, targets and mask of a batch, whether targets are in it or made here."""
        images, *rest = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        images = images.to(self.student.device)
        if self.targets is None:
            if not rest:
                raise ValueError("the data are images alone; give targets=..., or items of (image, target)")
            target, *rest = rest
        else:
            with torch.no_grad():
                target = self.targets(images)
            # weights that teacher and student share were cast without gradients; the student casts its own
            torch.clear_autocast_cache()
        if len(rest) > 1:
            raise ValueError(
                f"an item has {len(rest) - 1} parts too many; wanted (image, target[, valid]), "
                "without target where targets=... makes it"
            )
        return images, target, rest[0] if rest else None


def _batches(data: Dataset[Any], batch_size: int) -> Iterator[Any]:
    """All items in their order, made as in epoch 0 with seed 0."""
    plan = Plan(len(cast(Sized, data)), TrainConfig(batch_size=batch_size, shuffle=False))
    for parts in Batches(data, plan).epoch(0):
        yield from (batch for batch, _ in parts)
