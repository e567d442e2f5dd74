"""Speed side by side, on a clock of our own: no test waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regista.diagnosis.throughput import MOST_REPEATS, measure_throughput


class Clock:
    """Seconds that pass only when a model runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[str] = []

    def __call__(self) -> float:
        return self.now


class Stub:
    """A model whose forwards take seconds from a list, the last one again and again."""

    device = torch.device("cpu")

    def __init__(self, name: str, clock: Clock, *seconds: float) -> None:
        self.name, self.clock, self.seconds = name, clock, list(seconds)

    def __call__(self, images: torch.Tensor) -> None:
        self.clock.turns.append(self.name)
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def measured(clock: Clock, *models: Stub, rounds: int = 3, batch: int = 4) -> Any:
    pixels = torch.zeros(batch, 3, 2, 2)
    return measure_throughput(list(models), [pixels] * len(models), rounds=rounds, clock=clock)  # type: ignore[arg-type]


def test_ratio_is_the_median_of_the_rounds() -> None:
    clock = Clock()
    first = Stub("a", clock, 9.0, 1.0, 1.0, 2.0, 1.0)  # warm-up, the length of a forward, three rounds
    second = Stub("b", clock, 9.0, 2.0, 1.5, 2.0, 4.0)
    one, two = measured(clock, first, second)
    assert (one.images_per_second, one.cost, one.cost_range) == (4.0, 1.0, (1.0, 1.0))
    assert two.images_per_second == pytest.approx(4 / 2.0)
    assert two.cost == pytest.approx(1.5)
    assert two.cost_range == pytest.approx((1.0, 4.0))
    assert (two.rounds, two.batch_size) == (3, 4)


def test_models_take_turns_and_the_order_turns_around() -> None:
    clock = Clock()
    measured(clock, Stub("a", clock, 1.0), Stub("b", clock, 1.0), rounds=2)
    assert "".join(clock.turns) == "aabb" + "ab" + "ba"


def test_short_forwards_are_repeated() -> None:
    clock = Clock()
    one, two = measured(clock, Stub("a", clock, 0.03), Stub("b", clock, 0.001), rounds=1)
    assert clock.turns.count("a") == 2 + 4
    assert clock.turns.count("b") == 2 + MOST_REPEATS
    assert one.images_per_second == pytest.approx(4 / 0.03)
    assert two.cost == pytest.approx(1 / 30)


def test_mistakes() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match=r"rounds is at least 1, got 0"):
        measured(clock, Stub("a", clock, 1.0), rounds=0)
    with pytest.raises(ValueError, match=r"0 batches for 1 models"):
        measure_throughput([Stub("a", clock, 1.0)], [])  # type: ignore[list-item]
