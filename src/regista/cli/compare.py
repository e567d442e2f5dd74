"""``regista compare``: several models on the same images, and what became of the artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from regista.cli import options
from regista.cli.progress import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from regista.backbones.base import Backbone
    from regista.diagnosis.agreement import Denoise
    from regista.diagnosis.config import DiagnosisConfig

IMAGES = "--images"
SEED = 0
POSTER = "poster.png"


class ImagesCommand(TyperCommand):
    """A command whose ``--images`` takes every word up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat ``--images`` before each of its words."""
        spread: list[str] = []
        taking = False
        for word in args:
            if word.startswith("-") and word != "-":
                taking = word == IMAGES
                if not taking:
                    spread.append(word)
            else:
                spread += [IMAGES, word] if taking else [word]
        return super().parse_args(ctx, spread)


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL MODEL...",
        help="Two or more, named as for diagnose; the first is the reference. key=value settings may stand among them.",
        show_default=False,
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        IMAGES,
        metavar="IMAGES...",
        help="Files, folders or patterns: every word up to the next option.",
        show_default=False,
    ),
]
Denoised = Annotated[
    bool,
    typer.Option(
        "--denoised/--no-denoised", help="Compare with the reference's features, averaged over shifted views."
    ),
]
Views = Annotated[int, typer.Option("--views", min=2, help="Shifted views, a forward of the reference each.")]
Rounds = Annotated[int, typer.Option("--rounds", min=0, help="Turns of each model for the speed; 0 leaves it out.")]
Attention = Annotated[
    bool | None, typer.Option("--attention/--no-attention", help="Attention sinks and maps [default: attention].")
]


def command(
    models: Models = None,
    images: Images = None,
    denoised: Denoised = True,
    views: Views = 10,
    rounds: Rounds = 5,
    attention: Attention = None,
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
    """Several models on the same images, each judged against the first: did the cure help.

    Writes a run folder (a new one under runs/ unless told otherwise) with the record, the
    arrays, report.html and poster.png, and prints the verdicts.
    """
    from regista.diagnosis.config import DiagnosisConfig

    specs, settings = options.split_settings(models or [])
    files, more = options.split_settings(images or [])
    flags = {
        "image_size": image_size,
        "policy": policy,
        "batch_size": batch_size,
        "num_workers": workers,
        "attention": attention,
    }
    chosen = options.resolve(DiagnosisConfig, config, [*settings, *more], flags)
    if len(specs) < 2:
        raise ValueError(
            f"a comparison takes two models or more, got {len(specs)}: `regista compare A B --images IMAGES`; "
            "models come first, for --images takes every word up to the next option"
        )
    if not files:
        raise ValueError("no images given; name files, folders or patterns after --images")
    load = {"device": device.value, "dtype": dtype.value, "allow_partial": allow_partial}
    folder = out or options.new_folder("compare")
    voice = options.Voice(quiet=quiet, verbose=verbose, json=json_output)
    _run(specs, files, chosen, load, denoiser(views) if denoised else None, rounds, folder, force, voice)


def denoiser(num_views: int) -> Denoise:
    """Denoised features with the same views for every batch."""
    import torch

    from regista.methods.phreg import denoise

    def denoised(backbone: Backbone, pixels: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(SEED)
        return denoise(backbone, pixels, num_views=num_views, generator=generator)

    return denoised


def _run(
    specs: list[str],
    files: list[str],
    config: DiagnosisConfig,
    load: dict[str, Any],
    denoise: Denoise | None,
    rounds: int,
    out: Path,
    force: bool,
    voice: options.Voice,
) -> None:
    from regista.backbones.weights import weights_hash
    from regista.diagnosis.comparison import compare
    from regista.diagnosis.comparison_record import KIND, save_comparison
    from regista.report.compare_poster import comparison_picture
    from regista.report.compare_words import comparison_text
    from regista.report.html import write_report
    from regista.results import RunFolder

    paths = options.find_photos(files, voice)
    RunFolder.check(out, KIND, force=force)
    backbones = []
    for spec in specs:
        backbones.append(options.load_model(spec, image_size=config.image_size, **load))
        voice.detail("\n".join([spec, *backbones[-1].notes]))
    folder = RunFolder.create(out, KIND, force=force)
    total = len(paths) * (len(specs) + 1)
    bar = progress_bar("comparing", total, quiet=voice.quiet or voice.json)
    with folder.worth_keeping(), bar as progress:
        found = compare(backbones, paths, config=config, denoise=denoise, timed_rounds=rounds, progress=progress)
    for model in found.models:
        folder.log("compared", model=model.diagnosis.model, verdict=model.verdict, sentence=model.sentence)
    first = found.reference.diagnosis
    for path, reason in first.images["skipped"]:
        voice.note(f"skipped {path}: {reason}")
    voice.note(first.images["note"])
    save_comparison(folder, found, config=config, weights=[weights_hash(backbone.module) for backbone in backbones])
    comparison_picture(folder.path, folder.path / POSTER)
    folder.update(pictures={"poster": POSTER})
    page = write_report(folder.path)
    record = found.to_dict()
    typer.echo(json.dumps(record, allow_nan=False) if voice.json else comparison_text(record))
    voice.note(f"report: {page}")
