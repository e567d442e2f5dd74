"""The one table of tolerances: how near two computations of the same thing must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# dtype: (relative, absolute), for values of the order of one
TOLERANCES = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}
# float32 through the twelve or more blocks of real weights
DEEP = (1e-4, 1e-4)


def assert_close(got: Tensor, wanted: Tensor, *, dtype: torch.dtype | None = None, deep: bool = False) -> None:
    """Compare by the table; ``dtype`` is that of the computation, the result's own by default."""
    rtol, atol = DEEP if deep else TOLERANCES[dtype or got.dtype]
    options: dict[str, Any] = {"rtol": rtol, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(got, wanted, **options)
