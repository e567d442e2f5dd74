"""``regista ablate``: what each part of PH-Reg brings, as one table."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import stages

FEW_HELD_OUT = 8
COLUMNS = {
    "arm": "arm",
    "images": "held out",
    "outlier_share": "outliers",
    "target": "cosine to denoised",
    "others_raw": "others, to raw",
    "outliers_reference": "outliers, to reference",
    "others_reference": "others, to reference",
}


class Study(str, Enum):
    """What is varied."""

    ablation = "ablation"
    registers = "registers"
    views = "views"
    shift = "shift"
    unfrozen = "unfrozen"


StudyOption = Annotated[Study, typer.Option("--study", help="The paper's ablation, or a sweep.")]
Reference = Annotated[
    str | None, typer.Option("--reference", help="A healthy model to compare with, such as the one before planting.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder; finished arms stay.")]


def command(
    model: options.Model,
    images: options.Images = None,
    study: StudyOption = Study.ablation,
    reference: Reference = None,
    image_size: options.ImageSize = None,
    device: options.DeviceOption = options.Device.auto,
    out: options.Out = None,
    force: options.Force = False,
    resume: Resume = False,
    json_output: options.Json = False,
    config: options.Config = None,
    quiet: options.Quiet = False,
) -> None:
    """Train and measure the arms of a study of PH-Reg on the same held-out images.

    The ablation: denoise only, distil without both, with registers, with denoising, full. Sweeps:
    registers, views, shift ratio, unfrozen parts. Settings of the full arm are key=value. Another study with
    --resume in the same folder takes over the arms that both have.
    """
    from regista.methods.phreg.ablation import run_study
    from regista.methods.phreg.config import PhregConfig
    from regista.methods.phreg.method import Phreg
    from regista.methods.settings import configured, parsed
    from regista.results import RunFolder

    files, words = options.split_settings(images or [])
    settings = {**(options.read_config(config) if config else {}), **parsed(words)}
    chosen: PhregConfig = configured(PhregConfig, settings, what="method 'phreg'")
    if not files:
        raise ValueError("no images given; name files, folders or patterns after the model")
    voice = options.Voice(quiet=quiet, json=json_output)
    paths = options.find_photos(files, voice)
    folder = options.run_folder("ablate", "ablation", out, force=force, resume=resume, voice=voice)
    teacher = options.load_model(model, device=device.value, dtype="float32", image_size=image_size)
    healthy = None
    if reference is not None:
        healthy = options.load_model(reference, device=device.value, dtype="float32", image_size=image_size)
    Phreg(chosen).outline(teacher)
    run = RunFolder.create(folder, "ablation", force=force, resume=resume)
    with run.worth_keeping("arms"), stages(quiet=quiet or json_output) as progress:
        rows = run_study(
            teacher,
            paths,
            study.value,
            chosen,
            run.path / "arms",
            reference=healthy,
            progress=progress,
            on_row=lambda row: run.log("arm", **{key: row[key] for key in COLUMNS if key in row}),
        )
    table = markdown(rows)
    path = run.path / f"{study.value}.md"
    path.write_text(table, encoding="utf-8")
    held_out = min(row["images"] for row in rows)
    if held_out < FEW_HELD_OUT:
        voice.note(f"measured on {held_out} held-out images only: give more photos, or a larger held_out")
    run.update(model=model, reference=reference, study=study.value, config=settings, rows=rows)
    typer.echo(json.dumps(rows, allow_nan=False) if json_output else table.rstrip())
    voice.note(f"table: {_relative(path)}")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; measures that no arm has are left out."""
    columns = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = ["| " + " | ".join(COLUMNS[key] for key in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(key, row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "outlier_share":
        return f"{value:.2%}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
