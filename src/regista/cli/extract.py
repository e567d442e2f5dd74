"""``regista extract``: features of images in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regista.cli import options
from regista.cli.progress import progress_bar


def command(
    model: options.Model,
    images: options.Images = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="features.npz, .parquet or .safetensors")] = Path(
        "features.npz"
    ),
    kinds: Annotated[
        str, typer.Option("--features", help="Comma-separated, of cls, registers, patches, pooled.")
    ] = "cls,registers,patches,pooled",
    block: Annotated[
        int | None, typer.Option("--block", help="Tokens after this block (from 0), before any norm.")
    ] = None,
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
    from regista.data.images import ImageStream, find_images
    from regista.export.features import SUFFIXES, extract_features, write_features

    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out {out}: the suffix must be one of {', '.join(SUFFIXES)}")
    if out.exists() and not force:
        raise ValueError(f"{out} exists; --force replaces it")
    if not images:
        raise ValueError("no images given; name files, folders or patterns after the model")
    backbone = options.load_model(
        model, device=device.value, dtype=dtype.value, image_size=image_size, allow_partial=allow_partial
    )
    paths = find_images(images)
    policy_value = (policy or options.Policy.resize).value
    stream = ImageStream(
        paths,
        lambda batch: backbone.fit(batch, image_size=image_size, policy=policy_value),  # type: ignore[arg-type]
        batch_size=batch_size or 8,
        num_workers=workers or 0,
    )
    names: list[str] = []

    def pixels():  # type: ignore[no-untyped-def]
        for indices, fitted in stream:
            names.extend(str(paths[index]) for index in indices)
            yield fitted.pixels

    with progress_bar("extract", len(paths), quiet=quiet) as progress:
        features = extract_features(backbone, pixels(), kinds=kinds.split(","), block=block, progress=progress)
    write_features(out, names, features)
    for path, reason in stream.skipped:
        options.say(f"skipped {path}: {reason}", quiet=quiet)
    for kind, value in features.items():
        typer.echo(f"{kind:<9}  {'x'.join(map(str, value.shape))}")
    typer.echo(out)
