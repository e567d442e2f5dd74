"""Whether a checkpoint belongs to the run that wants to go on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from regista.results.writing import plain
from regista.train.config import TrainConfig
from regista.train.optimizers import named_parameters
from regista.train.task import TrainingTask

SHOWN = 5
_ABSENT = "absent"
# Of an optimizer's groups; others are how it computes, and differ between releases of torch.
_OPTIONS = ("lr_scale", "weight_decay", "betas", "eps", "momentum")


def run_facts(
    task: TrainingTask,
    config: TrainConfig,
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    group_names: list[list[str]],
    *,
    length: int,
    processes: int,
    bf16: bool,
) -> dict[str, Any]:
    """What decides the numbers of a run, as JSON has it; stored in each checkpoint."""
    parameters = {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{'' if value.requires_grad else ' frozen'}"
        for name, value in named_parameters(modules).items()
    }
    groups = []
    for group, names in zip(optimizer.param_groups, group_names, strict=True):
        simple = {key: group[key] for key in _OPTIONS if key in group}
        groups.append({**simple, "parameters": names})
    facts = {
        "config": {**config.decisive(), "precision": "bf16" if bf16 else "fp32"},
        "task": {"kind": type(task).__name__, **task.settings()},
        "items": length,
        "processes": processes,
        "parameters": parameters,
        "groups": groups,
    }
    result: dict[str, Any] = plain(facts, "", [])
    return result


def check_agreement(saved: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raise unless both sets of facts are the same.

    Raises:
        ValueError: naming what differs, with both values.
    """
    differences = list(_differences("", saved, wanted))
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(
            f"cannot go on from {name}, which another run made: {'; '.join(differences[:SHOWN])}{more}. "
            "Give the same settings, or begin anew in another folder"
        )


def _differences(where: str, saved: Any, wanted: Any) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*saved, *wanted]):
            place = f"{where}.{key}".removeprefix(".").removeprefix("config.")
            yield from _differences(place, saved.get(key, _ABSENT), wanted.get(key, _ABSENT))
    elif isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        for index, (before, now) in enumerate(zip(saved, wanted, strict=True)):
            yield from _differences(f"{where}[{index}]", before, now)
    elif saved != wanted:
        yield f"{where} was {_short(saved)}, is {_short(wanted)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
