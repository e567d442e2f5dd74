"""``regista demo``: a real ViT, clean and with planted artifacts, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from regista.cli import options
from regista.cli.progress import progress_bar

FOLDER = Path("runs/demo")
SPECS = ("demo", "demo-planted")


def command(
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; a former demo there is replaced.")] = FOLDER,
    photos: Annotated[int, typer.Option("--photos", min=2, help="How many of the installed photos.")] = 6,
    device: options.DeviceOption = options.Device.auto,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Diagnose a clean ViT and the same one with planted artifacts, on photos of installed packages."""
    from regista.backbones.weights import weights_hash
    from regista.data.photos import installed_photos
    from regista.diagnosis.config import DiagnosisConfig
    from regista.diagnosis.examination import diagnose
    from regista.diagnosis.record import save_diagnoses
    from regista.report.html import write_report
    from regista.report.text import summary_text
    from regista.results import RunFolder

    voice = options.Voice(quiet=quiet, json=json_output)
    chosen = installed_photos(limit=photos)
    if len(chosen) < 2:
        raise ValueError("found fewer than two photos in installed packages: pip install 'regista[demo]'")
    folder = RunFolder.create(out, "demo", force=True)
    config = DiagnosisConfig(policy="crop", batch_size=2)
    found, hashes = [], []
    for spec in SPECS:
        voice.note(f"loading {spec}" + (" (planting takes a minute the first time)" if spec != "demo" else ""))
        backbone = options.load_model(spec, device=device.value, dtype="float32")
        with progress_bar(spec, len(chosen), quiet=quiet) as progress:
            result = diagnose(
                backbone,
                [photo.load() for photo in chosen],
                config=config,
                names=[photo.name for photo in chosen],
                progress=progress,
            )
        found.append(result)
        hashes.append(weights_hash(backbone.module))
        folder.log("diagnosed", model=spec, verdict=result.verdict, kinds=result.kinds, weights_hash=hashes[-1])
        if not json_output:
            typer.echo(summary_text(result.to_dict()))
    sources = [f"{photo.name}: {photo.credit}" for photo in chosen]
    save_diagnoses(folder, found, config=config, notes=sources, weights=hashes)
    page = write_report(folder.path)
    if json_output:
        typer.echo(json.dumps({"models": [result.to_dict() for result in found]}, allow_nan=False))
    voice.note(f"open {page}")
