"""Speed of a diagnosis against the bare timm forward, side by side in one process.

Run: python benchmarks/diagnose_speed.py [--repeats 5] [--images 8] [--size 518] [--out FILE.json]

Both sides see the same ViT-S/14 with random weights, the same batch and the same threads.
Each repeat runs them in turn; the figures are medians of the repeats' ratios (images per
second relative to the bare forward, so 1.0 is no cost). Memory is the peak resident size over
the idle size, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from resident_memory import peak_of_script, peak_over_idle

import regista
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose

MODEL = "vit_small_patch14_dinov2"


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=518)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", choices=("bare", "norms", "attention"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    runs = workloads(options.images, options.batch_size, options.size)
    if options.memory:
        print(peak_over_idle(runs[options.memory]))
        return
    figures = speeds(runs, options.repeats, options.images) | memory(options)
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def workloads(images: int, batch_size: int, size: int) -> dict[str, Callable[[], object]]:
    """The bare forward and the two diagnoses, over the same preprocessed images."""
    torch.manual_seed(0)
    module = timm.create_model(MODEL, pretrained=False, img_size=size).eval()
    backbone = regista.load(module)
    pixels = torch.randn(images, 3, size, size)

    def bare() -> None:
        with torch.inference_mode():
            for batch in pixels.split(batch_size):
                module.forward_features(batch)

    norms = DiagnosisConfig(batch_size=batch_size, attention=False)
    attention = DiagnosisConfig(batch_size=batch_size)
    return {
        "bare": bare,
        "norms": lambda: diagnose(backbone, pixels, config=norms),
        "attention": lambda: diagnose(backbone, pixels, config=attention),
    }


def speeds(runs: dict[str, Callable[[], object]], repeats: int, images: int) -> dict[str, object]:
    """Median images per second of each side, and median ratio to the bare forward."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    figures: dict[str, object] = {"threads": torch.get_num_threads(), "repeats": repeats}
    for name, taken in seconds.items():
        figures[f"{name} images/s"] = round(images / statistics.median(taken), 3)
        ratios = [bare / own for bare, own in zip(seconds["bare"], taken, strict=True)]
        figures[f"{name} ratio"] = round(statistics.median(ratios), 3)
    return figures


def memory(options: argparse.Namespace) -> dict[str, object]:
    """Peak over idle resident memory of each side, in MiB, and the ratio to the bare forward."""
    peaks = {}
    for name in ("bare", "norms", "attention"):
        command = [__file__, "--memory", name, "--images", str(options.images)]
        command += ["--batch-size", str(options.batch_size), "--size", str(options.size)]
        peaks[name] = peak_of_script(command)
    figures: dict[str, object] = {f"{name} peak MiB": round(peak, 1) for name, peak in peaks.items()}
    return figures | {f"{name} memory ratio": round(peaks[name] / peaks["bare"], 3) for name in ("norms", "attention")}


if __name__ == "__main__":
    main()
