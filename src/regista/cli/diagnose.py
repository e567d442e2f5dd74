"""``regista diagnose``: has this model artifacts, where, and from which block on."""

from __future__ import annotations

import json
import re
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import progress_bar

if TYPE_CHECKING:
    from regista.backbones.base import Backbone
    from regista.diagnosis.config import DiagnosisConfig


Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="PATTERN",
        help="Files of one training run, in order of their names; MODEL (timm/NAME) gives the architecture.",
    ),
]
Consistency = Annotated[
    bool | None,
    typer.Option("--consistency/--no-consistency", help="Compare with shifted images; four more forwards."),
]
Attention = Annotated[
    bool | None, typer.Option("--attention/--no-attention", help="Attention sinks and maps [default: attention].")
]
Boxes = Annotated[
    Path | None, typer.Option("--boxes", help="Folder of VOC XML, or csv (image,xmin,ymin,xmax,ymax): hit ratio.")
]
Masks = Annotated[Path | None, typer.Option("--masks", help="Folder of PNG masks named as the images: hit ratio.")]
Cutoff = Annotated[
    float | None, typer.Option("--cutoff", help="Norm from which a token is an outlier [default: found in the norms].")
]


def command(
    model: options.Model,
    images: options.Images = None,
    models: options.MoreModels = None,
    checkpoints: Checkpoints = None,
    consistency: Consistency = None,
    attention: Attention = None,
    boxes: Boxes = None,
    masks: Masks = None,
    cutoff: Cutoff = None,
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

    Writes a run folder (a new one under runs/ unless told otherwise) with the record, the
    arrays and report.html, and prints the verdict.
    """
    from regista.diagnosis.config import DiagnosisConfig

    files, settings = options.split_settings(images or [])
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
    load = {"device": device.value, "dtype": dtype.value, "allow_partial": allow_partial}
    specs = _specs(model, models or [], checkpoints)
    kind = "checkpoints" if checkpoints else "diagnosis"
    folder = out or options.new_folder("diagnose")
    voice = options.Voice(quiet=quiet, verbose=verbose, json=json_output)
    _run(specs, files, chosen, load, boxes, masks, folder, kind, force, voice)


def _run(
    specs: list[str],
    files: list[str],
    config: DiagnosisConfig,
    load: dict[str, Any],
    boxes: Path | None,
    masks: Path | None,
    out: Path,
    kind: str,
    force: bool,
    voice: options.Voice,
) -> None:
    from regista.backbones.weights import weights_hash
    from regista.data.annotations import read_targets
    from regista.diagnosis.examination import diagnose
    from regista.diagnosis.record import save_diagnoses
    from regista.report.html import write_report
    from regista.results import RunFolder

    if not files:
        raise ValueError("no images given; name files, folders or patterns after the model")
    paths = options.find_photos(files, voice)
    targets = read_targets(boxes=boxes, masks=masks) if boxes or masks else None
    RunFolder.check(out, kind, force=force)

    def load_one(spec: str) -> Backbone:
        return options.load_model(spec, image_size=config.image_size, **load)

    found, hashes = [], []
    backbone: Backbone | None = load_one(next(iter(specs)))  # a wrong name leaves no folder behind
    folder = RunFolder.create(out, kind, force=force)
    for spec in specs:
        with folder.worth_keeping(), progress_bar(spec, len(paths), quiet=voice.quiet or voice.json) as progress:
            backbone = backbone or load_one(spec)
            voice.detail("\n".join([spec, *backbone.notes]))
            result = diagnose(backbone, paths, config=config, targets=targets, progress=progress)
        found.append(result)
        hashes.append(weights_hash(backbone.module))
        folder.log("diagnosed", model=spec, verdict=result.verdict, kinds=result.kinds, weights_hash=hashes[-1])
        backbone = None  # one at a time in memory
    for path, reason in found[0].images["skipped"]:
        voice.note(f"skipped {path}: {reason}")
    voice.note(found[0].images["note"])
    save_diagnoses(folder, found, config=config, weights=hashes)
    page = write_report(folder.path)
    _show([result.to_dict() for result in found], voice)
    voice.note(f"report: {page}")


def _specs(model: str, models: list[str], checkpoints: str | None) -> list[str]:
    if checkpoints is None:
        return [model, *models]
    if models:
        raise ValueError("--checkpoints follows one model; leave out -m")
    found = sorted(glob(checkpoints), key=_natural)
    if not found:
        raise ValueError(f"--checkpoints {checkpoints!r} matches no file")
    return [path if Path(path).is_dir() else f"{model}@{path}" for path in found]


def _natural(text: str) -> list[Any]:
    """Sort key that puts step 200 before step 1000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _show(records: list[dict[str, Any]], voice: options.Voice) -> None:
    from regista.report.text import summary_table, summary_text

    if voice.json:
        typer.echo(json.dumps({"models": records} if len(records) > 1 else records.pop(), allow_nan=False))
        return
    for record in records:
        typer.echo(summary_text(record))
    if len(records) > 1:
        typer.echo(summary_table(records))
