"""``regista diagnose``: has this model artifacts, where, and from which block on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import progress_bar


def command(
    model: options.Model,
    images: options.Images = None,
    models: options.MoreModels = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="PATTERN",
            help="Files of one training run, in order of their names; MODEL (timm/NAME) gives the architecture.",
        ),
    ] = None,
    consistency: Annotated[
        bool | None, typer.Option("--consistency/--no-consistency", help="Compare with shifted images (4 more forwards).")
    ] = None,
    attention: Annotated[
        bool | None, typer.Option("--attention/--no-attention", help="Attention sinks and maps.")
    ] = None,
    boxes: Annotated[
        Path | None, typer.Option("--boxes", help="VOC XML folder or csv (image,xmin,ymin,xmax,ymax) for the hit ratio.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option("--masks", help="Folder of PNG masks named as the images, for the hit ratio.")
    ] = None,
    cutoff: Annotated[
        float | None, typer.Option("--cutoff", help="Norm from which a token counts as an outlier [default: adaptive].")
    ] = None,
    image_size: options.ImageSize = None,
    policy: options.PolicyOption = None,
    batch_size: options.BatchSize = None,
    workers: options.Workers = None,
    device: options.DeviceOption = options.Device.auto,
    dtype: options.DtypeOption = options.Dtype.float32,
    out: options.Out = None,
    force: options.Force = False,
    json_output: options.Json = False,
    config: options.Config = None,
    allow_partial: options.AllowPartial = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Look for artifacts: outlier norms, attention sinks, positional residue, lazy pooling.

    Writes a run folder (runs/diagnose unless told otherwise) with the record, the arrays and
    report.html, and prints the verdict.
    """
    from regista.diagnosis.config import DiagnosisConfig
    from regista.diagnosis.examination import diagnose
    from regista.diagnosis.record import save_diagnoses
    from regista.results import RunFolder

    files, settings = options.split_settings(images or [])
    if not files:
        raise ValueError("no images given; name files, folders or patterns after the model")
    flags = {
        "image_size": image_size,
        "policy": policy,
        "batch_size": batch_size,
        "num_workers": workers,
        "attention": attention,
        "consistency": consistency,
        "cutoff": cutoff,
    }
    chosen = options.resolve(DiagnosisConfig, config, settings, flags)
    specs = _specs(model, models or [], checkpoints)
    folder = RunFolder.create(
        out or Path("runs/diagnose"), kind="checkpoints" if checkpoints else "diagnosis", force=force or out is None
    )
    targets = _targets(boxes, masks, files)
    found = []
    for spec in specs:
        backbone = options.load_model(
            spec, device=device.value, dtype=dtype.value, image_size=chosen.image_size, allow_partial=allow_partial
        )
        if verbose:
            options.say("\n".join([spec, *backbone.notes]))
        with progress_bar(spec, 0, quiet=quiet or json_output) as progress:
            result = diagnose(backbone, files, config=chosen, targets=targets, progress=progress)
        found.append(result)
        for path, reason in result.images["skipped"]:
            options.say(f"skipped {path}: {reason}", quiet=quiet)
        if result.images["note"]:
            options.say(result.images["note"], quiet=quiet or json_output)
        del backbone
    save_diagnoses(folder, found, config=chosen)
    report = _report(folder.path)
    _show(found, json_output)
    options.say(f"report: {report}", quiet=quiet)


def _specs(model: str, models: list[str], checkpoints: str | None) -> list[str]:
    if checkpoints is None:
        return [model, *models]
    if models:
        raise ValueError("--checkpoints follows one model; leave out -m")
    from glob import glob

    found = sorted(glob(checkpoints), key=_natural)
    if not found:
        raise ValueError(f"--checkpoints {checkpoints!r} matches no file")
    return [path if Path(path).is_dir() else f"{model}@{path}" for path in found]


def _natural(text: str) -> list[Any]:
    import re

    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _targets(boxes: Path | None, masks: Path | None, files: list[str]) -> Any:
    if boxes is None and masks is None:
        return None
    from regista.data.annotations import read_targets

    return read_targets(boxes=boxes, masks=masks)


def _report(folder: Path) -> Path:
    from regista.report.html import write_report

    return write_report(folder)


def _show(found: list[Any], json_output: bool) -> None:
    records = [result.to_dict() for result in found]
    if json_output:
        typer.echo(json.dumps(records.pop() if len(records) == 1 else {"models": records}, allow_nan=False))
        return
    from regista.report.text import summary_table, summary_text

    for record in records:
        typer.echo(summary_text(record))
    if len(records) > 1:
        typer.echo(summary_table(records))
