"""Building a model without memory and without random numbers, to know its names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SHAPES = {"requires_grad_", "resize_", "squeeze_", "unsqueeze_", "transpose_", "t_", "set_", "detach_"}


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules built inside are on the meta device, and their initialisation costs next to nothing."""
    with torch.device("meta"), _NoValues():
        yield


class _NoValues(TorchFunctionMode):
    """Leaves out in-place arithmetic on meta tensors, which have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name not in _SHAPES
        if in_place and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
