"""Settings of the insertion of register tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainedConfig:
    """Settings of ``trained``.

    Attributes:
        registers: How many register tokens are inserted; 4 in the paper. 0 changes nothing.
        std: Of their random initialisation, over sqrt(D) a channel: registers are about so long.
        seed: Of the initialisation.
    """

    registers: int = 4
    std: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.registers, bool) or not isinstance(self.registers, int) or self.registers < 0:
            raise ValueError(f"registers is a number of tokens, 0 or more, got {self.registers!r}")
        if not 0 < self.std < float("inf"):
            raise ValueError(f"std is positive, got {self.std!r}; equal registers would stay equal in training")
