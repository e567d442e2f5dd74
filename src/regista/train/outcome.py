"""What adds up during a training, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tally:
    """What adds up on the way; part of each checkpoint.

    Attributes:
        steps_done: Steps of the optimizer.
        sums, items: Of the running epoch: {term: sum over its items}, and how many.
        terms: {term: mean} of the last whole epoch.
        metrics: Of the last evaluation.
    """

    steps_done: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    items: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """How a training ended.

    Attributes:
        steps, epochs: Done in all, those before a resume too; whole epochs.
        terms: {term: mean} of the last whole epoch.
        metrics: Of the last evaluation.
        checkpoint: The last one.
        resumed_from: Steps done where this run went on, None if it began.
        notes: Checkpoints that were skipped.
    """

    steps: int
    epochs: int
    terms: dict[str, float]
    metrics: dict[str, float]
    checkpoint: Path
    resumed_from: int | None = None
    notes: list[str] = field(default_factory=list)
