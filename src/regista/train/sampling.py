"""Which items each step sees, and how they are made: the same for any number of workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from regista.train.config import TrainConfig
from regista.train.rng import mixed_seed, seeded_item


class SeededDataset(Dataset[Any]):
    """A dataset whose items depend on (index, epoch, seed) and on nothing else.

    Other datasets are fine too: whatever random numbers of torch, numpy and Python they draw
    come from generators that were seeded with the same three.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of items."""

    @abstractmethod
    def item(self, index: int, *, epoch: int, seed: int) -> Any:
        """One item; ``item_generator(index, epoch=epoch, seed=seed)`` gives its random numbers."""

    def __getitem__(self, index: int) -> Any:
        return self.item(index, epoch=0, seed=0)


def item_generator(index: int, *, epoch: int, seed: int) -> torch.Generator:
    """A CPU generator for one item of one epoch."""
    return torch.Generator().manual_seed(mixed_seed(seed, epoch, index))


@dataclass(frozen=True)
class ItemKey:
    """What one item is made from."""

    index: int
    epoch: int
    seed: int


@dataclass(frozen=True)
class Part:
    """What one forward pass of one process sees.

    Attributes:
        indices: Of the dataset.
        share: Weight of its mean loss in the step's, times the number of processes (which
            averages them): a last, smaller part counts by its number of items.
    """

    indices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Plan:
    """Steps of every epoch, for one of several processes.

    Args:
        length: Items of the dataset.
        config: Batch size, accumulation, shuffle, drop_last and seed are used.

    Raises:
        ValueError: for an empty dataset, or one too small for a step with ``drop_last``.
    """

    length: int
    config: TrainConfig
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        if not self.length:
            raise ValueError("the dataset is empty: there is nothing to train on")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{self.length} items do not fill one step of {self.step_size} (batch size x accumulation x "
                "processes) and drop_last is set; lower batch_size or gradient_accumulation"
            )

    @property
    def step_size(self) -> int:
        """Items of a full step, over all processes."""
        return self.config.batch_size * self.config.gradient_accumulation * self.processes

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        if self.config.drop_last:
            return self.length // self.step_size
        return -(-self.length // self.step_size)

    def size(self, step: int) -> int:
        """Items of a step of an epoch, over all processes."""
        return min(self.step_size, self.length - step * self.step_size)

    def order(self, epoch: int) -> Tensor:
        """(length,) indices in the order of an epoch."""
        if not self.config.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(mixed_seed(self.config.seed, epoch))
        return torch.randperm(self.length, generator=generator)

    def parts(self, order: Tensor, step: int) -> list[Part]:
        """The forward passes of a step of an epoch; every process has equally many."""
        start, size = step * self.step_size, self.size(step)
        found = []
        for piece in torch.split(order[start : start + size], self.config.batch_size * self.processes):
            mine = piece[self.process :: self.processes].tolist()
            share = self.processes * len(mine) / size
            # a process without an item runs one that counts nothing: gradients are averaged over all
            found.append(Part(tuple(mine) if mine else (int(piece[-1]),), share))
        return found


class Batches:
    """Loads the batches of one epoch after the other, with workers that stay."""

    def __init__(self, dataset: Dataset[Any], plan: Plan, *, pin_memory: bool = False) -> None:
        self.plan = plan
        self._keys: list[list[ItemKey]] = []
        workers = plan.config.num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _KeyedDataset(dataset),
            batch_sampler=_Listed(self),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            collate_fn=_Collate(getattr(dataset, "collate", default_collate)),
            generator=torch.Generator().manual_seed(0),  # else it draws from the global one
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[tuple[Any, float]]]:
        """Steps of an epoch from ``first_step`` on, each a list of (batch, share), as ``Part`` has it.

        Raises:
            ValueError: what the dataset raised, in its own words.
        """
        order = self.plan.order(epoch)
        steps = [self.plan.parts(order, step) for step in range(first_step, self.plan.steps_per_epoch)]
        seed = self.plan.config.seed
        self._keys = [[ItemKey(i, epoch, seed) for i in part.indices] for parts in steps for part in parts]
        loaded = iter(self._loader)
        for parts in steps:
            yield [(_unless_failed(next(loaded)), part.share) for part in parts]

    @property
    def keys(self) -> list[list[ItemKey]]:
        """Of the epoch that is being loaded."""
        return self._keys


class _Listed:
    """The batch sampler: whatever keys the epoch has when an iteration begins."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[ItemKey]]:
        return iter(self.batches.keys)

    def __len__(self) -> int:
        return len(self.batches.keys)


class _KeyedDataset(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, key: ItemKey) -> Any:
        try:
            with seeded_item(mixed_seed(key.seed, key.epoch, key.index)):
                if isinstance(self.dataset, SeededDataset):
                    return self.dataset.item(key.index, epoch=key.epoch, seed=key.seed)
                return self.dataset[key.index]
        except ValueError as error:
            return _Failed(f"item {key.index} of the training data: {error}")


@dataclass(frozen=True)
class _Failed:
    """A mistake on its way out of a worker, without the worker's stack trace."""

    message: str


@dataclass(frozen=True)
class _Collate:
    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> Any:
        failed = [item for item in items if isinstance(item, _Failed)]
        return failed[0] if failed else self.collate(items)


def _unless_failed(batch: Any) -> Any:
    if isinstance(batch, _Failed):
        raise ValueError(batch.message)
    return batch
