"""Speed of an epoch of PH-Reg with stored targets against one that denoises anew at every step.

Run: python benchmarks/phreg_speed.py [--repeats 3] [--images 14] [--size 224] [--batch-size 4] [--out FILE.json]

Both sides train the same student (the demo ViT-S/14 with 8 registers) on the same photos of the installed
packages for one epoch, in one process, in turn: reading images or stored maps, the student's forward and
backward pass, the update; no held-out numbers and no checkpoint, which are the same for both. The figure is the
median of the repeats' ratios of seconds (aim 0.35). "storing" is what computing the targets once costs, in
epochs with stored targets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import regista
from regista.backbones.base import Backbone
from regista.data.photos import installed_photos
from regista.methods.phreg.config import PhregConfig
from regista.methods.phreg.distilling import Material, fresh_targets, gather
from regista.methods.phreg.student import make_student, parts_of, trained_parameters
from regista.objectives.distil import DistilTask
from regista.train.config import TrainConfig
from regista.train.loop import train


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=int, default=14)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16", "auto"), default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="regista-phreg-speed-") as folder:
        figures = measure(options, Path(folder))
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Median seconds of an epoch of each side, and the median of their ratios."""
    teacher = regista.load("demo", image_size=(options.size, options.size))
    paths = [photo.path for photo in installed_photos()][: options.images]
    stored = PhregConfig(registers=8, batch_size=options.batch_size, lr=1e-4, precision=options.precision)
    sides = {"stored": stored, "fresh": replace(stored, targets="fresh")}
    start = time.perf_counter()
    material = {"stored": gathered(teacher, paths, stored, folder, resume=False)}
    storing = time.perf_counter() - start
    material["fresh"] = gathered(teacher, paths, sides["fresh"], folder, resume=True)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(options.repeats + 1):
        for name, config in sides.items():
            seconds = epoch(teacher, material[name], config, folder / f"{name}-{repeat}")
            if repeat:  # the first is for warming up
                taken[name].append(seconds)
    ratios = [one / other for one, other in zip(taken["stored"], taken["fresh"], strict=True)]
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "threads": torch.get_num_threads(),
        "images": len(paths),
        "size": options.size,
        "batch size": options.batch_size,
        "precision": options.precision,
        "repeats": options.repeats,
        **{f"{name} s": round(seconds, 2) for name, seconds in medians.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "storing, in epochs": round(storing / medians["stored"], 2),
    }


def gathered(teacher: Backbone, paths: list[Path], config: PhregConfig, folder: Path, *, resume: bool) -> Material:
    """The data of one side; both read the same store."""
    where = folder / "targets"
    return gather(teacher, paths, config, where, resume=resume, teacher_features=None, progress=None)


def epoch(teacher: Backbone, material: Material, config: PhregConfig, folder: Path) -> float:
    """Seconds of the second of two epochs, from the last step of the first to its own."""
    student = make_student(teacher, config.registers, config.seed)
    task = DistilTask(
        student,
        trained_parameters(student, teacher, parts_of(config.unfrozen, clip=False)),
        material.train,
        targets=fresh_targets(teacher, config, None) if config.targets == "fresh" else None,
    )
    two_epochs = TrainConfig(
        epochs=2,
        batch_size=config.batch_size,
        lr=1e-4,
        precision=config.precision,
        checkpoint_every_epochs=None,
        evaluate_every=0,
    )
    ends: list[float] = []
    train(task, two_epochs, folder, progress=lambda _done, _of: ends.append(time.perf_counter()))
    return ends[-1] - ends[len(ends) // 2 - 1]


if __name__ == "__main__":
    main()
