"""Building models without their initialisation, which takes longer than reading weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Initialisers, and what they do to a tensor in place. Copying is not among it: that is how weights get in.
_FILLING = {"mul_", "add_", "sub_", "div_", "clamp_", "erfinv_", "fill_", "zero_", "normal_", "uniform_"}
_FILLING |= {"trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"}
_FILLING |= {"orthogonal_", "constant_", "ones_", "zeros_"}


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules built inside have names and shapes but no values: all on the meta device."""
    with torch.device("meta"), _NoFilling(Tensor):
        yield


@contextmanager
def to_be_filled(every_parameter: bool = True) -> Iterator[None]:
    """Parameters of modules built inside hold whatever was in memory; buffers are computed as ever.

    Only for models of which every parameter is loaded afterwards. The random state stays as it was.

    Args:
        every_parameter: False if some may stay as they are: then all is initialised.
    """
    with torch.random.fork_rng(devices=[]), _NoFilling(nn.Parameter) if every_parameter else nullcontext():
        yield


class _NoFilling(TorchFunctionMode):
    """Leaves out in-place arithmetic on meta tensors, or on all parameters."""

    def __init__(self, kind: type[Tensor]) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")
        ours = isinstance(target, self.kind) and (target.is_meta or self.kind is nn.Parameter)
        if ours and getattr(func, "__name__", "") in _FILLING:
            return target
        return func(*args, **(kwargs or {}))
