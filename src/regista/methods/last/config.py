"""Settings of selective pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Union


@dataclass(frozen=True)
class LastConfig:
    """Settings of ``last``.

    Attributes:
        k: Patches picked per channel: a count, or a share (a float in (0, 1]). A quarter of them is
            the paper's 49 of 196 (text); its models with labels are best with 7 of 49. Released: 1.
        variant: Score of "paper" (equation 5) or of the "released" training code.
        eps: Keeps scores finite.
    """

    k: Union[int, float] = 0.25  # noqa: UP007  OmegaConf reads this form; 1 and 1.0 differ
    variant: Literal["paper", "released"] = "paper"
    eps: float = 1e-6
