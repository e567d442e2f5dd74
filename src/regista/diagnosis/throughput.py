"""How fast models are, measured side by side: in one process, taking turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone

LEAST_SECONDS = 0.1
MOST_REPEATS = 20


@dataclass(frozen=True)
class Throughput:
    """Speed of one model beside the first.

    Attributes:
        images_per_second: Median over rounds.
        cost: Time an image over that of the first model, the median of the rounds' ratios.
        cost_range: The smallest and the largest of these ratios.
        rounds: How often each model had its turn.
        batch_size: Images a forward.
    """

    images_per_second: float
    cost: float
    cost_range: tuple[float, float]
    rounds: int
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the record."""
        return {**asdict(self), "cost_range": list(self.cost_range)}


@torch.inference_mode()
def measure_throughput(
    backbones: Sequence[Backbone],
    batches: Sequence[Tensor],
    *,
    rounds: int = 5,
    clock: Callable[[], float] = perf_counter,
) -> list[Throughput]:
    """Time forward passes of several models in turns, after a warm-up.

    Other work on the machine slows all models of a round alike, so the ratio of a round stands
    where seconds do not. The order turns around from round to round. Forwards that are short are
    repeated to a tenth of a second.

    Args:
        backbones: The first is what the others are compared with.
        batches: One batch (B, 3, H, W) a model, preprocessed.
        rounds: Turns of each model, at least 1.
        clock: Seconds, for tests.

    Raises:
        ValueError: for no round, or another number of batches than models.
    """
    if rounds < 1:
        raise ValueError(f"rounds is at least 1, got {rounds}; to measure no speed, leave the call out")
    if len(backbones) != len(batches) or not backbones:
        raise ValueError(f"got {len(batches)} batches for {len(backbones)} models; give one a model")
    placed = [batch.to(backbone.device) for backbone, batch in zip(backbones, batches, strict=True)]
    repeats = []
    for backbone, batch in zip(backbones, placed, strict=True):
        backbone(batch)
        once = _seconds(backbone, batch, 1, clock)
        repeats.append(min(MOST_REPEATS, max(1, math.ceil(LEAST_SECONDS / max(once, 1e-6)))))
    taken: list[list[float]] = [[] for _ in backbones]
    for turn in range(rounds):
        order = range(len(backbones)) if turn % 2 == 0 else reversed(range(len(backbones)))
        for index in order:
            seconds = _seconds(backbones[index], placed[index], repeats[index], clock)
            taken[index].append(seconds / (repeats[index] * len(placed[index])))
    first = taken[0]
    found = []
    for times, batch in zip(taken, placed, strict=True):
        ratios = [own / theirs for own, theirs in zip(times, first, strict=True)]
        found.append(
            Throughput(1 / median(times), median(ratios), (min(ratios), max(ratios)), rounds, len(batch)),
        )
    return found


def _seconds(backbone: Backbone, batch: Tensor, repeats: int, clock: Callable[[], float]) -> float:
    _wait(backbone.device)
    start = clock()
    for _ in range(repeats):
        backbone(batch)
    _wait(backbone.device)
    return clock() - start


def _wait(device: torch.device) -> None:
    """Until what was sent to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
