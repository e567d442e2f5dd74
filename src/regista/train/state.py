"""Modules, optimizer and random numbers as named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from regista.train.checkpoints import Checkpoint
from regista.train.optimizers import named_parameters
from regista.train.rng import random_state, restore_random_state

MODULES = "modules"
OPTIMIZER = "optimizer"
RANDOM = "random"


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """{"module.key": tensor} of all parameters and buffers that ``state_dict`` has.

    Raises:
        ValueError: for a value in there that is no tensor.
    """
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        for key, value in module.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}.{key} is a {type(value).__name__}; checkpoints hold tensors only")
            found[f"{name}.{key}"] = value
    return found


def load_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], source: str) -> None:
    """The inverse of ``module_tensors``, in place.

    Raises:
        ValueError: if names or shapes differ; nothing is loaded then.
    """
    wanted = module_tensors(modules)
    wrong = [
        f"{name} was {_shape(tensors.get(name))}, is {_shape(wanted.get(name))}"
        for name in dict.fromkeys([*tensors, *wanted])
        if _shape(tensors.get(name)) != _shape(wanted.get(name))
    ]
    if wrong:
        raise ValueError(f"cannot go on from {source}, its tensors differ: {'; '.join(wrong[:5])}")
    for name, module in modules.items():
        prefix = f"{name}."
        module.load_state_dict({key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)})


def optimizer_tensors(optimizer: Optimizer, names: list[list[str]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the optimizer by parameter: {"name/key": tensor}, and what is no tensor."""
    flat = [name for group in names for name in group]
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            (tensors if isinstance(value, Tensor) else rest)[f"{flat[index]}/{key}"] = value
    return tensors, rest


def load_optimizer(
    optimizer: Optimizer, names: list[list[str]], tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """The inverse of ``optimizer_tensors``; the groups' options stay as they are."""
    place = {name: index for index, name in enumerate(name for group in names for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest}.items():
        name, _, kind = key.rpartition("/")
        state.setdefault(place[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def gathered_random_state() -> dict[str, Tensor]:
    """{"process.generator": state} of all processes; every process must call it."""
    states = gather_object([random_state()])
    return {f"{process}.{key}": value for process, state in enumerate(states) for key, value in state.items()}


def load_random_state(checkpoint: Checkpoint, process: int) -> None:
    """Give this process the states it had."""
    prefix = f"{process}."
    tensors = checkpoint.tensors(RANDOM)
    restore_random_state({key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)})


def _shape(value: Tensor | None) -> str:
    return "absent" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def check_parameters(modules: Mapping[str, nn.Module], step: int) -> None:
    """Raise ``ValueError`` for the first trained parameter that holds NaN or infinity after a step."""
    for name, value in named_parameters(modules).items():
        if value.requires_grad and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} holds NaN or infinite values after step {step}; no checkpoint is written of it")
