"""Settings of the neighbour average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass(frozen=True)
class NeighbourAverageConfig:
    """Settings of ``neighbour_average``.

    Attributes:
        block: At whose output tokens are replaced, counted from 0; the outliers' onset if None.
        cutoff: Norm at that output from which a patch is an outlier; found in the norms if None.
        kernel: Weights of the 8 neighbours: "uniform", or "gaussian" (2 beside, 1 across a corner).
        batch_size: Images a forward.
    """

    block: Optional[int] = None  # noqa: UP045
    cutoff: Optional[float] = None  # noqa: UP045
    kernel: Literal["uniform", "gaussian"] = "uniform"
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.kernel not in ("uniform", "gaussian"):
            raise ValueError(f"kernel is 'uniform' or 'gaussian', got {self.kernel!r}")
