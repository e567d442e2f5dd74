"""Pieces that the backbone tests share: pictures, weights that matter, a record of a module's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone

ROWS, COLS = 6, 5


def pictures(backbone: Backbone, count: int = 2, size: tuple[int, int] | None = None, seed: int = 0) -> Tensor:
    """Seeded noise as preprocessed images, (count, 3, H, W); non-square and non-native by default."""
    height, width = size or (ROWS * backbone.patch_size, COLS * backbone.patch_size)
    noise = torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))
    return noise.to(device=backbone.device, dtype=backbone.dtype)


def randomise(module: nn.Module, scale: float = 1.0, seed: int = 0) -> nn.Module:
    """Give zero or constant parameters (tokens, tables, biases, layer scales) values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.numel() and (parameter.ndim < 2 or not name.endswith("weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1 * scale)
            elif parameter.ndim == 2:
                parameter.mul_(2 * scale)
    return module.eval()


def drop_half(module: nn.Module) -> None:
    """Turn every dropout of the module on, so that training mode shows."""
    rates = ("p", "dropout", "attention_dropout", "drop_prob")
    found = [(child, name) for child in module.modules() for name in rates if isinstance(vars(child).get(name), float)]
    assert found
    for child, name in found:
        setattr(child, name, 0.5)


def state(module: nn.Module) -> dict[str, Any]:
    """All that a call must leave as it was: modes, hooks, flags, which parameter sits where, every value."""
    found: dict[str, Any] = {"function modes": torch._C._len_torch_function_stack()}
    for path, child in module.named_modules():
        config = getattr(child, "config", None)
        found[f"{path} config"] = dict(vars(config)) if config is not None else None
        for name, value in vars(child).items():
            if "hooks" in name and value is not None:
                found[f"{path}.{name}"] = len(value)
            elif name in ("_parameters", "_buffers"):
                found[f"{path}.{name}"] = {key: id(tensor) for key, tensor in value.items()}
                found[f"{path}.{name} values"] = {
                    key: None if tensor is None else tensor.detach().cpu().numpy().tobytes()
                    for key, tensor in value.items()
                    if tensor is None or tensor.dtype != torch.bfloat16
                }
            elif value is None or isinstance(value, (bool, int, float, str, tuple)):
                found[f"{path}.{name}"] = repr(value)
    return found


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Fail if the module's ``state`` differs at the end."""
    before = state(module)
    yield
    after = state(module)
    differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    assert not differing, f"left changed: {differing}"


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal shapes, and values equal to ``tolerance``."""
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)
