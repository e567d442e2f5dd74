"""``regista fix``: a cured model, its numbers before and after, and how to load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import stages

if TYPE_CHECKING:
    from regista.methods.protocol import Method
    from regista.results import RunFolder

KIND = "fix"


class ExportFormat(str, Enum):
    """What the cured model is written as."""

    auto = "auto"
    timm = "timm"
    transformers = "transformers"
    regista = "regista"
    onnx = "onnx"


MethodName = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="test_time, phreg, trained, last, neighbour_average or sinder; their cards name the settings.",
        show_default=False,
    ),
]
Registers = Annotated[int | None, typer.Option("--registers", min=0, help="How many register tokens.")]
Format = Annotated[ExportFormat, typer.Option("--format", help="For which library the model is written.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of everything random in the method.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder of --out.")]
Held = Annotated[
    str | None, typer.Option("--test", help="Images for the numbers before and after [default: those given].")
]


@dataclass(frozen=True)
class Order:
    """What is to be done, checked as far as it can be without a model."""

    model: str
    method: Method
    settings: dict[str, Any]
    given: list[str]
    images: list[Path]
    tested: list[Path]
    load: dict[str, Any]
    format: str
    out: Path
    force: bool
    resume: bool


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
    from regista.methods.fixing import chosen_method
    from regista.methods.settings import parsed

    voice = options.Voice(quiet=quiet, verbose=verbose, json=json_output)
    files, words = options.split_settings(images or [])
    flags = {"registers": registers, "seed": seed, "batch_size": batch_size}
    given = {key: value for key, value in flags.items() if value is not None}
    settings = {**(options.read_config(config) if config else {}), **parsed(words), **given}
    chosen = chosen_method(method, settings)
    if chosen.needs_images and not files:
        raise ValueError(f"method {chosen.name!r} needs images; name files, folders or patterns after it")
    found = options.find_photos(files, voice)
    order = Order(
        model=model,
        method=chosen,
        settings=settings,
        given=files,
        images=found,
        tested=options.find_photos([test], voice) if test else found,
        load={"device": device.value, "dtype": dtype.value, "allow_partial": allow_partial, "image_size": image_size},
        format=format.value,
        out=options.run_folder("fix", KIND, out, force=force, resume=resume, voice=voice),
        force=force,
        resume=resume,
    )
    _run(order, voice)


def _run(order: Order, voice: options.Voice) -> None:
    """Load, refuse what cannot be, then make the folder and cure."""
    from regista.backbones.weights import weights_hash
    from regista.data.images import skipped_files
    from regista.export.model_export import check_format
    from regista.results import RunFolder

    backbone = options.load_model(order.model, **order.load)
    voice.detail(f"loaded {order.model}: {backbone.layout()}")
    asked = _asked(order, weights_hash(backbone.module))
    there = RunFolder.check(order.out, KIND, force=order.force, resume=order.resume)
    if there is not None:
        _refuse_other(there, asked)
        if _is_finished(there, order.format):
            voice.note(f"the run in {order.out} is finished; nothing is left to do")
            _show(there.record.to_dict(), there.path / "model", voice)
            return
    check_format(order.method.outline(backbone), order.format)  # type: ignore[arg-type]
    run = RunFolder.create(order.out, KIND, force=order.force, resume=order.resume)
    run.update(asked=asked, weights_hash=asked["model"], seed=getattr(order.method.config, "seed", None))
    run.log("loaded", model=order.model, weights_hash=asked["model"])
    with run.worth_keeping("work", "model"), skipped_files() as skipped:
        facts = _cure(order, backbone, run, voice)
    run.update(**facts, skipped=[[path, reason] for path, reason in skipped.items()])
    _show(facts, run.path / "model", voice)


def _cure(order: Order, backbone: Any, run: RunFolder, voice: options.Voice) -> dict[str, Any]:
    """Fit, measure and export: what the record says of it."""
    from regista.backbones.weights import weights_hash
    from regista.diagnosis.config import DiagnosisConfig
    from regista.methods.before_after import before_and_after
    from regista.methods.fixing import fix
    from regista.methods.protocol import Workspace

    work = Workspace(run.path / "work", resume=order.resume)
    with stages(quiet=voice.quiet or voice.json) as progress:
        fixed = fix(
            backbone,
            order.method.name,
            order.images or None,
            progress=progress,
            workspace=work,
            **order.settings,
        )
    run.log("fitted", method=order.method.name)
    config = DiagnosisConfig(attention=False)
    records, cautions = before_and_after(backbone, fixed, order.tested, config=config)
    history = fixed.history[-1]
    card: dict[str, Any] = {"title": f"{backbone.name} with {order.method.name}", "method": order.method.name}
    card |= {"config": history["config"], "records": records}
    written, problem = _export(fixed, run.path / "model", order.format, card)
    run.log("exported", format=written.format, folder=str(written.folder))
    return {
        "model": order.model,
        "method": order.method.name,
        "config": history["config"],
        "layout": str(fixed.layout()),
        "history": fixed.history,
        "before_after": records,
        "images": {"given": order.given, "count": len(order.images), "tested": len(order.tested)},
        "fixed_weights_hash": weights_hash(fixed.module),
        "export_format": written.format,
        "snippet": written.snippet,
        "notes": list(dict.fromkeys([*fixed.notes, *cautions, *written.notes, *problem, *_size_of(work.folder)])),
    }


def _export(fixed: Any, folder: Path, format: str, card: dict[str, Any]) -> tuple[Any, list[str]]:  # noqa: A002
    """The model in the format that was asked for; if that fails after all, in Regista's own, and why."""
    from regista.export.model_export import export_model

    try:
        return export_model(fixed, folder, format=format, card=card, force=True), []  # type: ignore[arg-type]
    except ValueError as error:
        if format == "regista":
            raise
        kept = export_model(fixed, folder, format="regista", card=card, force=True)
        return kept, [f"written for Regista, not as {format}: {error}"]


def _asked(order: Order, model: str) -> dict[str, Any]:
    """All that decides the result: a run goes on only where it is the same."""
    from regista.data.images import files_digest
    from regista.methods.settings import plain_config

    size = order.load["image_size"]
    return {
        "model": model,
        "method": order.method.name,
        "config": plain_config(order.method.config),
        "images": files_digest(order.images),
        "test": files_digest(order.tested),
        "image_size": None if size is None else list(size),
        "dtype": order.load["dtype"],
    }


def _refuse_other(run: RunFolder, asked: dict[str, Any]) -> None:
    from regista.results.record import differences

    then = run.record.get("asked")
    wrong = differences(then, asked) if isinstance(then, dict) else ["it does not say for what"]
    if wrong:
        raise ValueError(
            f"{run.path} was run otherwise ({'; '.join(wrong)}), so it cannot be resumed; take another folder, or "
            "--force to begin anew"
        )


def _is_finished(run: RunFolder, format: str) -> bool:  # noqa: A002
    written = run.record.get("export_format")
    return written is not None and format in ("auto", written) and (run.path / "model").is_dir()


def _size_of(work: Path) -> list[str]:
    """How much lies in the work folder, if it is worth a word."""
    size = sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) / 1e6 if work.is_dir() else 0
    if size < 1:
        return []
    return [f"{work} holds {size:.0f} MB of targets and checkpoints, for --resume; it can be deleted"]


def _show(facts: dict[str, Any], folder: Path, voice: options.Voice) -> None:
    if voice.json:
        typer.echo(json.dumps(facts, allow_nan=False, default=str))
        return
    typer.echo(f"{facts['model']} with {facts['method']}: {facts['layout']}")
    for record in facts["before_after"]:
        typer.echo(f"  {record['measure']:<34}  {_words(record['before'])} -> {_words(record['after'])}")
    for note in facts["notes"]:
        voice.note(note)
    typer.echo(f"\n{folder} ({facts['export_format']}); load it:\n\n{facts['snippet']}")


def _words(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
