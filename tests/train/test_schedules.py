"""Learning rates against published tables and closed forms."""

from __future__ import annotations

import math

import pytest

from regista.train.config import TrainConfig
from regista.train.schedules import make_schedule

STEPS = 7


@pytest.mark.parametrize(
    ("lr", "end", "table"),
    [
        (1e-4, 5e-6, {1: 9.705e-5, 10: 7.411e-5, 30: 4.071e-5, 70: 1.228e-5, 100: 5e-6}),
        (3e-4, 1e-5, {1: 2.900e-4, 10: 2.135e-4, 30: 1.081e-4, 70: 2.774e-5, 100: 1e-5}),
    ],
)
def test_exponential_by_epochs_is_the_released_table(lr: float, end: float, table: dict[int, float]) -> None:
    config = TrainConfig(epochs=100, lr=lr, end_lr=end, schedule="exponential-epochs")
    rate = make_schedule(config, STEPS)
    for epoch, wanted in table.items():  # epochs from 1, as in the table; their last step has the epoch's value
        assert rate(epoch * STEPS - 1) == pytest.approx(wanted, rel=1e-3)
    assert rate(100 * STEPS - 1) == pytest.approx(end, rel=1e-12)


def test_exponential_lags_by_one_step() -> None:
    config = TrainConfig(epochs=4, lr=1e-2, end_lr=1e-3, schedule="exponential-epochs")
    rate = make_schedule(config, 3)
    # the slow way: a rate is written after each step
    current, used = config.lr, []
    for epoch in range(4):
        for _ in range(3):
            used.append(current)
            current = max(1e-3, 1e-2 * 0.1 ** ((epoch + 1) / 4))
    assert [rate(step) for step in range(12)] == pytest.approx(used, rel=1e-12)
    assert used[0] == 1e-2
    assert rate(3) == rate(2) > rate(4) == rate(5) == rate(6)


def test_constant() -> None:
    rate = make_schedule(TrainConfig(epochs=2, lr=0.3), STEPS)
    assert {rate(step) for step in range(14)} == {0.3}


def test_warm_up_rises_in_a_line() -> None:
    config = TrainConfig(epochs=4, lr=0.4, schedule="cosine", warmup_epochs=1.0)
    rate = make_schedule(config, 4)
    assert [rate(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_cosine_and_linear() -> None:
    cosine = make_schedule(TrainConfig(epochs=2, lr=1.0, end_lr=0.2, schedule="cosine"), 5)
    assert [cosine(step) for step in range(11)] == pytest.approx(
        [0.2 + 0.4 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    )
    linear = make_schedule(TrainConfig(epochs=2, lr=1.0, end_lr=0.2, schedule="linear"), 5)
    assert [linear(step) for step in range(11)] == pytest.approx([1 - 0.08 * step for step in range(11)])
    assert [cosine(10), linear(10)] == pytest.approx([0.2, 0.2])


def test_warm_up_all_the_way() -> None:
    rate = make_schedule(TrainConfig(epochs=1, lr=1.0, schedule="linear", warmup_epochs=1.0), 2)
    assert [rate(0), rate(1)] == [0.5, 1.0]


def test_an_epoch_has_steps() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        make_schedule(TrainConfig(), 0)
