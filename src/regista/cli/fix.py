"""``regista fix``: a cured model, its numbers before and after, and how to load it."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import stages

if TYPE_CHECKING:
    from regista.backbones.base import Backbone
    from regista.results import RunFolder

MEASURED = 64  # images of the diagnosis before and after


class ExportFormat(str, Enum):
    """What the cured model is written as."""

    auto = "auto"
    timm = "timm"
    transformers = "transformers"
    regista = "regista"
    onnx = "onnx"


MethodName = Annotated[
    str,
    typer.Argument(metavar="METHOD", help="test_time, phreg, trained, last ...; see the README.", show_default=False),
]
Registers = Annotated[int | None, typer.Option("--registers", min=0, help="How many register tokens.")]
Format = Annotated[ExportFormat, typer.Option("--format", help="For which library the model is written.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of everything random in the method.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
Held = Annotated[
    str | None, typer.Option("--test", help="Images for the numbers before and after [default: those given].")
]


def command(
    model: options.Model,
    method: MethodName,
    images: options.Images = None,
    registers: Registers = None,
    format: Format = ExportFormat.auto,  # noqa: A002
    test: Held = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = None,
    seed: Seed = None,
    device: options.DeviceOption = options.Device.auto,
    dtype: options.DtypeOption = options.Dtype.float32,
    out: options.Out = None,
    force: options.Force = False,
    resume: Resume = False,
    json_output: options.Json = False,
    config: options.Config = None,
    allow_partial: options.AllowPartial = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Cure a model and write it for the library it is from.

    Writes a run folder (a new one under runs/ unless told otherwise) with the cured model in
    model/, and its outliers before and after on the images. Settings of the method are key=value.
    """
    from regista.methods.protocol import method_class
    from regista.methods.settings import configured, parsed

    files, words = options.split_settings(images or [])
    kind = method_class(method)
    flags = {"registers": registers, "seed": seed, "batch_size": batch_size}
    given = {key: value for key, value in flags.items() if value is not None}
    settings = {**(options.read_config(config) if config else {}), **parsed(words), **given}
    chosen = kind(configured(kind.config_class, settings, what=f"method {kind.name!r}"))  # before anything is loaded
    voice = options.Voice(quiet=quiet, verbose=verbose, json=json_output)
    if chosen.needs_images and not files:
        raise ValueError(f"method {kind.name!r} needs images; name files, folders or patterns after it")
    load = {"device": device.value, "dtype": dtype.value, "allow_partial": allow_partial, "image_size": image_size}
    folder = out or options.new_folder("fix")
    _run(model, kind.name, files, test, settings, load, format.value, folder, force, resume, voice)


def _run(
    model: str,
    method: str,
    files: list[str],
    test: str | None,
    settings: dict[str, Any],
    load: dict[str, Any],
    format: str,  # noqa: A002
    out: Path,
    force: bool,
    resume: bool,
    voice: options.Voice,
) -> None:
    from regista.backbones.weights import weights_hash
    from regista.data.images import find_images
    from regista.export.model_export import export_model
    from regista.methods.fixing import fix
    from regista.methods.protocol import Workspace
    from regista.results import RunFolder

    paths = find_images(files) if files else []
    tested = find_images([test]) if test else paths
    run = RunFolder.create(out, "fix", force=force, resume=resume)
    backbone = options.load_model(model, **load)
    voice.detail("\n".join([model, *backbone.notes]))
    run.log("loaded", model=model, weights_hash=weights_hash(backbone.module))
    with stages(quiet=voice.quiet or voice.json) as progress:
        fixed = fix(
            backbone,
            method,
            paths or None,
            progress=progress,
            workspace=Workspace(run.path / "work", resume=resume),
            **settings,
        )
    records = before_and_after(backbone, fixed, tested[:MEASURED], run)
    card = {"method": method, "config": fixed.history[-1]["config"], "records": records}
    title = f"{backbone.name} with {method}"
    written = export_model(fixed, run.path / "model", format=format, card={"title": title, **card}, force=True)  # type: ignore[arg-type]
    facts = {
        "model": model,
        "method": method,
        "layout": str(fixed.layout()),
        "history": fixed.history,
        "before_after": records,
        "export_format": written.format,
        "snippet": written.snippet,
        "notes": [*fixed.notes, *written.notes],
    }
    run.update(**facts, config=fixed.history[-1]["config"], weights=[weights_hash(fixed.module)])
    run.log("fixed", method=method, folder=str(written.folder))
    _show(facts, written.folder, voice)


def before_and_after(backbone: Backbone, fixed: Backbone, paths: list[Path], run: RunFolder) -> list[dict[str, Any]]:
    """Outliers of both on the same images; nothing without images."""
    from regista.diagnosis.config import DiagnosisConfig
    from regista.diagnosis.examination import diagnose

    if not paths:
        return []
    found = [diagnose(model, paths, config=DiagnosisConfig(attention=False)) for model in (backbone, fixed)]
    run.log("diagnosed", before=found[0].verdict, after=found[1].verdict)
    before, after = found
    records: list[dict[str, Any]] = [
        {"measure": "verdict (norms)", "before": before.verdict, "after": after.verdict},
        {"measure": "outlier share", "before": round(before.share, 6), "after": round(after.share, 6)},
    ]
    ratios = [one.measures["high_norm"]["ratio"] for one in found]
    records.append({"measure": "outlier norm / median", "before": ratios[0], "after": ratios[1]})
    return records


def _show(facts: dict[str, Any], folder: Path, voice: options.Voice) -> None:
    if voice.json:
        typer.echo(json.dumps(facts, allow_nan=False, default=str))
        return
    typer.echo(f"{facts['model']} with {facts['method']}: {facts['layout']}")
    for record in facts["before_after"]:
        typer.echo(f"  {record['measure']:<22}  {_words(record['before'])} -> {_words(record['after'])}")
    for note in facts["notes"]:
        voice.note(note)
    typer.echo(f"\n{folder} ({facts['export_format']}); load it:\n\n{facts['snippet']}")


def _words(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
