"""Settings of test-time registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass(frozen=True)
class TestTimeConfig:
    """Settings of ``test_time``.

    Attributes:
        top_k: How many register neurons; None takes the fewest that remove the outliers.
        cutoff: Norm from which a patch is an outlier; found in the norms if None.
        last_block: The last block in which neurons are looked for; the outliers' onset if None.
        registers: Tokens that receive the activations; one is enough in the paper.
        variant: "paper", or "released" for the released code's shared value and untouched CLS.
        form: "token" adds registers; "attention-bias" adds a constant key and value instead.
        batch_size: Images a forward.
    """

    __test__ = False  # no test, whatever pytest thinks of the name

    top_k: Optional[int] = None  # noqa: UP045
    cutoff: Optional[float] = None  # noqa: UP045
    last_block: Optional[int] = None  # noqa: UP045
    registers: int = 1
    variant: Literal["paper", "released"] = "paper"
    form: Literal["token", "attention-bias"] = "token"
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k is a number of neurons, 0 or more, got {self.top_k}")
        if self.registers < 1:
            raise ValueError(f"registers is at least 1, got {self.registers}")
        if self.variant not in ("paper", "released"):
            raise ValueError(f"variant is 'paper' or 'released', got {self.variant!r}")
        if self.form not in ("token", "attention-bias"):
            raise ValueError(f"form is 'token' or 'attention-bias', got {self.form!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
