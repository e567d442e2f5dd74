"""Lists of what users rely on: public names with their signatures, commands with their options.

``python -m tests.guards.golden`` (``make golden``) writes them again after a change that is meant.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SURFACE = HERE.parent / "api_surface.json"
OPTIONS = HERE.parent / "cli_options.json"

# What outside code may call. Names that do not exist yet are left out of the list until they do.
PUBLIC = (
    "regista.load",
    "regista.diagnose",
    "regista.fix",
    "regista.reshape_transform",
    "regista.backbones.base.Backbone",
    "regista.backbones.base.Features",
    "regista.backbones.base.Planted",
    "regista.tokens.Segment",
    "regista.tokens.TokenLayout",
    "regista.results.RunFolder",
    "regista.diagnosis.Diagnosis",
    "regista.diagnosis.DiagnosisConfig",
    "regista.diagnosis.find_outliers",
    "regista.methods.phreg.sample_views",
    "regista.methods.phreg.denoise",
    "regista.methods.test_time.find_register_neurons",
    "regista.methods.last.SelectivePool",
    "regista.methods.last.patch_scores",
    "regista.methods.reap.cluster_mask",
    "regista.methods.rats.RegisterAttention",
    "regista.methods.rats.part_masks",
    "regista.metrics.many_to_one_miou",
    "regista.metrics.one_to_one_miou",
    "regista.metrics.mean_best_overlap",
    "regista.metrics.adjusted_rand_index",
    "regista.metrics.MeanIoU",
    "regista.metrics.MeanImageIoU",
    "regista.metrics.depth_metrics",
    "regista.metrics.corloc",
    "regista.evaluation.discovery.lost",
)
MISSING = object()


def public_surface() -> dict[str, str]:
    """{dotted name: signature} of everything in ``PUBLIC`` that exists, classes with their members."""
    found: dict[str, str] = {}
    for name in PUBLIC:
        value = resolved(name)
        if value is MISSING:
            continue
        found[name] = signature(value)
        if inspect.isclass(value):
            found.update({f"{name}.{member}": text for member, text in members(value).items()})
    return dict(sorted(found.items()))


def _belongs(value: type, name: str) -> bool:
    """False for what another library has hung on torch's classes while the tests ran."""
    owner = next((base for base in value.__mro__ if name in vars(base)), None)
    home = getattr(inspect.getattr_static(value, name), "__module__", None)
    return owner is not torch.nn.Module or not isinstance(home, str) or home.startswith("torch")


def members(value: type) -> dict[str, str]:
    """Public methods with signatures, properties and fields of a class."""
    texts = {field.name: "field" for field in fields(value)} if is_dataclass(value) else {}
    for name in dir(value):
        if (name.startswith("_") and name != "__call__") or name in texts:
            continue
        if name == "__call__" and not any(name in vars(base) for base in value.__mro__):
            continue
        attribute = inspect.getattr_static(value, name)
        if not _belongs(value, name):
            continue
        if isinstance(attribute, property):
            texts[name] = "property"
        elif callable(getattr(value, name)):
            texts[name] = signature(getattr(value, name))
    return texts


def resolved(name: str) -> Any:
    """The object of a dotted name; ``MISSING`` if there is none, an error if its module is broken."""
    parts = name.split(".")
    value: Any = import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        module = ".".join(parts[:depth])
        if not inspect.ismodule(value) or not hasattr(value, "__path__") or find_spec(module) is None:
            return MISSING
        value = import_module(module)
    return value


def signature(value: Any) -> str:
    """Parameters as they are written, the same in every Python version."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "(...)"
    words, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
        keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        word = stars + parameter.name
        if isinstance(parameter.annotation, str):
            word += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            word += " = " + re.sub(r" at 0x[0-9a-f]+", "", repr(parameter.default))
        words.append(word)
    return f"({', '.join(words)})"


def command_options() -> dict[str, list[str]]:
    """{command: its arguments and options} of the ``regista`` command."""
    import typer.main

    from regista.cli.main import app

    group: Any = typer.main.get_command(app)
    return {
        name: [parameter_text(parameter) for parameter in group.commands[name].params]
        for name in sorted(group.commands)
    }


def parameter_text(parameter: Any) -> str:
    """Of a click parameter: every spelling, and whether it must be given."""
    if parameter.param_type_name == "argument":
        text = str(parameter.metavar or parameter.name.upper())
    else:
        text = "/".join([*parameter.opts, *parameter.secondary_opts])
    return f"{text} (required)" if parameter.required else text


def difference(path: Path, now: dict[str, Any]) -> list[str]:
    """What the list on disk and the code say differently, one line each."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"gone: {name}" for name in kept if name not in now]
    lines += [f"new: {name}" for name in now if name not in kept]
    lines += [f"{name}: was {kept[name]}, is {now[name]}" for name in now if name in kept and kept[name] != now[name]]
    return lines


def write() -> None:
    """Write both lists."""
    for path, value in ((SURFACE, public_surface()), (OPTIONS, command_options())):
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
