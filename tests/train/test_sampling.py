"""What each step sees."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from regista.train.sampling import Batches, Plan
from tests.train.tasks import GlobalRandomPoints, Points, settings


def indices(plan: Plan, epoch: int = 0) -> list[list[int]]:
    order = plan.order(epoch)
    return [
        [index for part in plan.parts(order, step) for index in part.indices] for step in range(plan.steps_per_epoch)
    ]


def test_every_item_once_an_epoch_in_new_orders() -> None:
    plan = Plan(22, settings())
    assert plan.steps_per_epoch == 6
    one, two = indices(plan, 0), indices(plan, 1)
    for steps in (one, two):
        assert sorted(chain(*steps)) == list(range(22))
        assert [len(step) for step in steps] == [4, 4, 4, 4, 4, 2]
    assert one != two
    assert one == indices(Plan(22, settings(num_workers=2)), 0)
    assert one != indices(Plan(22, settings(seed=5)), 0)
    assert list(chain(*indices(Plan(22, settings(shuffle=False))))) == list(range(22))


def test_drop_last() -> None:
    plan = Plan(22, settings(drop_last=True))
    assert [len(step) for step in indices(plan)] == [4] * 5
    with pytest.raises(ValueError, match="3 items do not fill one step of 4"):
        Plan(3, settings(drop_last=True))


def test_shares_weigh_each_item_the_same() -> None:
    plan = Plan(7, settings(batch_size=4, gradient_accumulation=2))
    (parts,) = [plan.parts(plan.order(0), step) for step in range(plan.steps_per_epoch)]
    assert [len(part.indices) for part in parts] == [4, 3]
    assert [part.share for part in parts] == pytest.approx([4 / 7, 3 / 7])


@pytest.mark.parametrize("length", [1, 13, 24, 25, 29])
def test_processes_share_a_step(length: int) -> None:
    processes, config = 3, settings(batch_size=4, gradient_accumulation=2)
    plans = [Plan(length, config, process, processes) for process in range(processes)]
    for step in range(plans[0].steps_per_epoch):
        weights: Counter[int] = Counter()
        runs = [plan.parts(plan.order(2), step) for plan in plans]
        assert len({len(parts) for parts in runs}) == 1  # all go forward equally often
        for parts in runs:
            for part in parts:
                assert 1 <= len(part.indices) <= 4
                for index in part.indices:
                    weights[index] += part.share / len(part.indices) / processes  # averaged over processes
        counted = {index: weight for index, weight in weights.items() if weight}
        assert len(counted) == plans[0].size(step)
        assert list(counted.values()) == pytest.approx([1 / len(counted)] * len(counted))


def test_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        Plan(0, settings())


def loaded(data: Dataset[Any], workers: int, epoch: int, first: int = 0) -> list[Tensor]:
    batches = Batches(data, Plan(22, settings(num_workers=workers)))
    batches_of_other_epochs = list(batches.epoch(5)) if workers else []  # workers that have run before
    del batches_of_other_epochs
    return [batch[0] for parts in batches.epoch(epoch, first) for batch, _ in parts]


@pytest.mark.parametrize("data", [Points(), GlobalRandomPoints()], ids=["seeded", "global"])
def test_workers_change_nothing(data: Dataset[Any]) -> None:
    alone, two = loaded(data, 0, 1), loaded(data, 2, 1)
    assert len(alone) == len(two) == 11
    assert all(torch.equal(a, b) for a, b in zip(alone, two, strict=True))
    assert not torch.equal(alone[0], loaded(data, 0, 2)[0])


@pytest.mark.parametrize("data", [Points(), GlobalRandomPoints()], ids=["seeded", "global"])
def test_an_epoch_from_the_middle(data: Dataset[Any]) -> None:
    whole, rest = loaded(data, 0, 1), loaded(data, 0, 1, first=3)
    assert len(rest) == 5
    assert all(torch.equal(a, b) for a, b in zip(whole[6:], rest, strict=True))


def test_loading_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    loaded(GlobalRandomPoints(), 0, 0)
    loaded(GlobalRandomPoints(), 2, 0)
    assert torch.equal(before, torch.get_rng_state())


class Broken(Points):
    def item(self, index: int, *, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        if index == 9:
            raise ValueError("nine.jpg cannot be read")
        return super().item(index, epoch=epoch, seed=seed)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_comes_out_of_a_worker_in_its_own_words(workers: int) -> None:
    with pytest.raises(ValueError, match=r"^item 9 of the training data: nine\.jpg cannot be read$"):
        list(Batches(Broken(), Plan(22, settings(num_workers=workers))).epoch(0))


class Collated(Points):
    def collate(self, items: list[tuple[Tensor, Tensor]]) -> int:
        return len(items)


def test_a_dataset_may_collate() -> None:
    plan = Plan(22, settings(batch_size=4, gradient_accumulation=1))
    sizes = list(Batches(Collated(), plan).epoch(0))
    assert [batch for parts in sizes for batch, _ in parts] == [4, 4, 4, 4, 4, 2]
