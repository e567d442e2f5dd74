"""Settings of the singular-defect repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass(frozen=True)
class SinderConfig:
    """Settings of ``sinder``.

    Attributes:
        inputs: What the MLPs see while their linear map is fitted: "unit" Gaussians (the paper and
            its code), or those after the second norm's weight and bias ("normed").
        num_samples: Gaussian inputs for each MLP; 100,000 in the paper.
        seed: Of them.
        num_deviations: Above the mean |cos| of its image a token is a defect; 4 in the paper.
        ignore_border: Never call the outermost ring of cells defects, as the paper does.
        min_tokens: An image with fewer defects has none; 3 in the paper.
        temperature: Of the repair's weights; 0.1 in the paper.
        block: At whose output tokens are replaced, counted from 0; the first offending one if None.
        batch_size: Images a forward.
    """

    inputs: Literal["unit", "normed"] = "unit"
    num_samples: int = 100_000
    seed: int = 0
    num_deviations: float = 4.0
    ignore_border: bool = True
    min_tokens: int = 3
    temperature: float = 0.1
    block: Optional[int] = None  # noqa: UP045
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.inputs not in ("unit", "normed"):
            raise ValueError(f"inputs is 'unit' or 'normed', got {self.inputs!r}")
        if not 0 < self.num_deviations < float("inf"):
            raise ValueError(f"num_deviations is positive, got {self.num_deviations}")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is at least 1, got {self.min_tokens}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is positive, got {self.temperature}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
