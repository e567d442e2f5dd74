"""``regista demo``: a real ViT, clean and with planted artifacts, and two cures of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regista.cli import options
from regista.cli.progress import progress_bar, stages

if TYPE_CHECKING:
    from regista.backbones.base import Backbone
    from regista.data.photos import Photo
    from regista.results import RunFolder

FOLDER = Path("runs/demo")
SPECS = ("demo", "demo-planted")
SICK = "demo-planted-position"
CURE_SIZE = (224, 224)
# A short run of PH-Reg: enough to see it work on a laptop, far from the paper's length.
PHREG = {"registers": 8, "epochs": 60, "batch_size": 4, "max_aspect": 1.0, "lr": 1e-4, "held_out": 0.2}

Cure = Annotated[bool, typer.Option("--cure/--no-cure", help="Also cure a planted model, by two methods.")]


def command(
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; a former demo there is replaced.")] = FOLDER,
    photos: Annotated[int, typer.Option("--photos", min=2, help="How many of the installed photos.")] = 6,
    cure: Cure = True,
    device: options.DeviceOption = options.Device.auto,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Diagnose a ViT, clean and with planted artifacts, on photos of installed packages, and cure it.

    Writes report.html (the diagnosis) and cure/report.html: the planted model, the same with
    test-time registers, and the same after a short self-distillation.
    """
    from regista.data.photos import installed_photos
    from regista.results import RunFolder

    voice = options.Voice(quiet=quiet, json=json_output)
    chosen = installed_photos(limit=photos)
    if len(chosen) < 2:
        raise ValueError("found fewer than two photos in installed packages: pip install 'regista[demo]'")
    folder = RunFolder.create(out, "demo", force=True)
    records = _diagnose(chosen, folder, device.value, voice)
    pages = [folder.path / "report.html"]
    compared: dict[str, Any] | None = None
    if cure:
        compared = _cure(installed_photos(), folder.path, device.value, voice)
        pages.append(folder.path / "cure" / "report.html")
    if json_output:
        typer.echo(json.dumps({"models": records, "cure": compared}, allow_nan=False))
    for page in pages:
        voice.note(f"open {page}")


def _diagnose(chosen: list[Photo], folder: RunFolder, device: str, voice: options.Voice) -> list[dict[str, Any]]:
    """The clean model and the planted one: their records."""
    from regista.backbones.weights import weights_hash
    from regista.diagnosis.config import DiagnosisConfig
    from regista.diagnosis.examination import diagnose
    from regista.diagnosis.record import save_diagnoses
    from regista.report.html import write_report
    from regista.report.text import summary_text

    config = DiagnosisConfig(policy="crop", batch_size=2)
    found, hashes = [], []
    for spec in SPECS:
        backbone = _load(spec, device, voice)
        with progress_bar(spec, len(chosen), quiet=voice.quiet) as progress:
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
        if not voice.json:
            typer.echo(summary_text(result.to_dict()))
    sources = [f"{photo.name}: {photo.credit}" for photo in chosen]
    save_diagnoses(folder, found, config=config, notes=sources, weights=hashes)
    write_report(folder.path)
    return [result.to_dict() for result in found]


def _cure(photos: list[Photo], folder: Path, device: str, voice: options.Voice) -> dict[str, Any]:
    """Two cures of the planted model, compared on the photos: the record."""
    from regista.cli.compare import POSTER, denoiser
    from regista.diagnosis.comparison import compare
    from regista.diagnosis.comparison_record import KIND, save_comparison
    from regista.diagnosis.config import DiagnosisConfig
    from regista.methods.fixing import fix
    from regista.report.compare_poster import comparison_picture
    from regista.report.compare_words import comparison_text
    from regista.report.html import write_report
    from regista.results import RunFolder

    sick = _load(SICK, device, voice, image_size=CURE_SIZE)
    paths = [photo.path for photo in photos]
    with stages(quiet=voice.quiet or voice.json) as progress:
        voice.note("curing it with test-time registers (seconds)")
        by_hand = fix(sick, "test_time", paths, progress=progress)
        voice.note("curing it with a short PH-Reg (a few minutes)")
        trained = fix(sick, "phreg", paths, progress=progress, **PHREG)  # type: ignore[arg-type]
    run = RunFolder.create(folder / "cure", KIND, force=True)
    config = DiagnosisConfig(policy="crop", batch_size=2, image_size=list(CURE_SIZE))
    models: list[Backbone] = [sick, by_hand, trained]
    found = compare(
        models,
        [photo.load() for photo in photos],
        config=config,
        denoise=denoiser(10),
        timed_rounds=3,
        names=[photo.name for photo in photos],
    )
    save_comparison(run, found, config=config)
    run.update(notes=[*(f"{photo.name}: {photo.credit}" for photo in photos)])
    comparison_picture(run.path, run.path / POSTER)
    run.update(pictures={"poster": POSTER})
    write_report(run.path)
    record = found.to_dict()
    if not voice.json:
        typer.echo(comparison_text(record))
    return record


def _load(spec: str, device: str, voice: options.Voice, **settings: Any) -> Backbone:
    voice.note(f"loading {spec}" + (" (planting takes a minute the first time)" if spec != "demo" else ""))
    return options.load_model(spec, device=device, dtype="float32", **settings)
