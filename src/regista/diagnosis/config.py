"""Settings of a diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional

POLICIES = ("resize", "pad", "crop", "error")


@dataclass
class DiagnosisConfig:
    """Settings of ``diagnose``; see there.

    Attributes:
        image_size: [height, width] in pixels; the model's own if None.
        policy: How images come to that size: resize | pad | crop | error.
        batch_size: Images a forward.
        num_workers: Threads that read images ahead.
        attention: Read attention statistics and maps.
        consistency: Compare features with those of shifted images; four more forwards.
        cutoff: Norm from which a token is an outlier; adaptive if None.
    """

    image_size: Optional[list[int]] = None  # noqa: UP045  OmegaConf reads this form
    policy: str = "resize"
    batch_size: int = 8
    num_workers: int = 1
    attention: bool = True
    consistency: bool = False
    cutoff: Optional[float] = None  # noqa: UP045

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is one of {POLICIES}, got {self.policy!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
        if self.image_size is not None and (len(self.image_size) != 2 or min(self.image_size) < 1):
            raise ValueError(f"image_size is [height, width] in pixels, got {self.image_size}")
        if self.cutoff is not None and not 0 < self.cutoff < float("inf"):
            raise ValueError(f"cutoff is a positive norm, got {self.cutoff}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the record."""
        return asdict(self)
