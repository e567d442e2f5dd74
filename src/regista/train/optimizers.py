"""Optimizers and their parameter groups, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from regista.train.config import TrainConfig


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """{"module.parameter": parameter}; one that is shared has its first name."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}"] = parameter
    return found


def make_optimizer(
    groups: list[dict[str, Any]], modules: Mapping[str, nn.Module], config: TrainConfig
) -> tuple[Optimizer, list[list[str]]]:
    """The optimizer of a run, and the names of the parameters of each group.

    Raises:
        ValueError: for no parameters, a frozen one, one that stands twice or belongs to no
            module, and for a trainable one that stands in no group.
    """
    parameters = named_parameters(modules)
    names = {id(parameter): name for name, parameter in parameters.items()}
    ready = [{**group, "params": list(group.get("params", ()))} for group in groups]
    given = [parameter for group in ready for parameter in group["params"]]
    if not given:
        raise ValueError("parameter_groups() has no parameter: nothing would be trained")
    if any(id(parameter) not in names for parameter in given):
        raise ValueError("a parameter of parameter_groups() is in none of modules(); checkpoints would not hold it")
    listed = [[names[id(parameter)] for parameter in group["params"]] for group in ready]
    flat = [name for group in listed for name in group]
    frozen = sorted(name for name in flat if not parameters[name].requires_grad)
    twice = sorted({name for name in flat if flat.count(name) > 1}) if len(set(flat)) < len(flat) else []
    left_out = sorted({name for name, value in parameters.items() if value.requires_grad} - set(flat))
    for wrong, words in (
        (frozen, "are frozen (requires_grad is False) but stand in parameter_groups()"),
        (twice, "stand more than once in parameter_groups()"),
        (left_out, "have requires_grad but stand in no group; freeze them or add them"),
    ):
        if wrong:
            raise ValueError(f"{len(wrong)} parameters {words}: {', '.join(wrong[:5])}{' ...' * (len(wrong) > 5)}")
    for group in ready:
        group.setdefault("lr_scale", 1.0)
    if config.optimizer == "sgd":
        return SGD(ready, lr=config.lr, momentum=config.betas[0], weight_decay=config.weight_decay), listed
    return AdamW(ready, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay), listed


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group, times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
