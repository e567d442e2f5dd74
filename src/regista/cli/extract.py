"""``regista extract``: features of images in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regista.cli import options
from regista.cli.progress import progress_bar

Output = Annotated[Path, typer.Option("-o", "--out", help="features.npz, .parquet or .safetensors")]
Kinds = Annotated[str, typer.Option("--features", help="Comma-separated, of cls, registers, patches, pooled.")]
Block = Annotated[int | None, typer.Option("--block", help="Tokens after this block (from 0), before any norm.")]


def command(
    model: options.Model,
    images: options.Images = None,
    out: Output = Path("features.npz"),
    kinds: Kinds = "cls,registers,patches,pooled",
    block: Block = None,
    image_size: options.ImageSize = None,
    policy: options.PolicyOption = options.Policy.resize,
    batch_size: options.BatchSize = 8,
    workers: options.Workers = 1,
    device: options.DeviceOption = options.Device.auto,
    dtype: options.DtypeOption = options.Dtype.float32,
    force: options.Force = False,
    allow_partial: options.AllowPartial = False,
    quiet: options.Quiet = False,
) -> None:
    """Write CLS, register, patch and pooled features; patches row by row."""
    from regista.data.images import find_images
    from regista.export.features import check_output, extract_features, file_batches, write_features

    check_output(out, force=force)
    if not images:
        raise ValueError("no images given; name files, folders or patterns after the model")
    paths = find_images(images)
    backbone = options.load_model(
        model, device=device.value, dtype=dtype.value, image_size=image_size, allow_partial=allow_partial
    )
    batches = file_batches(
        backbone,
        paths,
        image_size=image_size,
        policy=(policy or options.Policy.resize).value,
        batch_size=batch_size or 8,
        num_workers=workers or 0,
    )
    with progress_bar("extract", len(paths), quiet=quiet) as progress:
        features = extract_features(backbone, batches, kinds=kinds.split(","), block=block, progress=progress)
    write_features(out, batches.names, features)
    voice = options.Voice(quiet=quiet)
    for path, reason in batches.skipped:
        voice.note(f"skipped {path}: {reason}")
    voice.note(batches.note)
    for kind, value in features.items():
        typer.echo(f"{kind:<9}  {'x'.join(map(str, value.shape))}")
    typer.echo(out)
