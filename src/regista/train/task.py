"""What the loop needs to know of a task; how it gets its loss is its own business."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset


class TrainingTask(Protocol):
    """Something that can be trained: supervised, by distillation, without labels ...

    Subclasses write the methods without a body; the others may stay as they are. All steps and
    epochs count from 0.
    """

    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """{name without dots: module}: moved to the device, kept whole in checkpoints.

        All that changes while training is in here, a teacher that follows the student too. What
        never changes (a fixed teacher) is better left out: it would be in every checkpoint.
        """

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups for the optimizer: all parameters of ``modules`` that have ``requires_grad``, each once.

        ``{"params": [...]}`` with, where they differ from the run's settings, ``weight_decay``
        or other options of the optimizer, and ``lr_scale``, by which the rate is multiplied.
        """

    @abstractmethod
    def dataset(self) -> Dataset[Any]:
        """The training data; best a ``regista.train.sampling.SeededDataset``.

        A method ``collate(items)`` of it makes the batch, else torch's own collation.
        """

    @abstractmethod
    def loss(self, batch: Any, *, step: int, epoch: int) -> dict[str, Tensor]:
        """Scalars: "loss", a mean over the batch that is minimised, and named terms for the log.

        Args:
            batch: What collation made, on the device.
        """

    def evaluate(self, epoch: int) -> dict[str, float]:
        """Numbers on data held out, after an epoch; may be empty. Restores the modules' modes."""
        return {}

    def check(self) -> None:
        """Raise ``ValueError`` for what cannot work, before anything is written."""
        return

    def settings(self) -> dict[str, Any]:
        """What decides the result beside the run's settings, as JSON has it; compared on resume."""
        return {}

    def prepared(self) -> AbstractContextManager[Any]:
        """Entered for the whole training: freezes parameters, say, and gives them back."""
        return nullcontext()

    def train_mode(self) -> None:
        """Put the modules into training mode; called before each epoch."""
        for module in self.modules().values():
            module.train()

    def after_step(self, step: int, epoch: int) -> None:
        """Called after each step of the optimizer: a teacher that follows the student moves here."""
        return
