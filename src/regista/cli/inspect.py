"""``regista inspect``: what a model is made of, as far as registers are concerned."""

from __future__ import annotations

import json

import typer

from regista.cli import options


def command(
    model: options.Model,
    image_size: options.ImageSize = None,
    device: options.DeviceOption = options.Device.cpu,
    dtype: options.DtypeOption = options.Dtype.float32,
    json_output: options.Json = False,
    allow_partial: options.AllowPartial = False,
) -> None:
    """Print token layout, registers, FFN kind, attention backend, positions and weights."""
    from regista.backbones.inspection import inspect_backbone

    backbone = options.load_model(
        model, device=device.value, dtype=dtype.value, image_size=image_size, allow_partial=allow_partial
    )
    facts = inspect_backbone(backbone)
    if json_output:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        lines = value if isinstance(value, list) and value and isinstance(value, list) else [value]
        text = ", ".join(str(part) for part in lines)
        typer.echo(f"{key.replace('_', ' '):<{width}}  {text}")
