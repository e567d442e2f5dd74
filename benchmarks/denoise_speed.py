"""Speed and memory of denoising against bare forwards of the same views, side by side in one process.

Run: python benchmarks/denoise_speed.py [--repeats 5] [--views 10] [--size 518] [--batch-size 1] [--out FILE.json]

Both sides see the same ViT-S/14 with random weights, the same images and the same threads. Each
repeat runs them in turn; the figure is the median of the repeats' ratios of seconds (1.0: making the
views and mapping them back costs nothing; the aim is 1.05). The bare side is timm's own forward,
once a view. Memory is the peak resident size over the idle size, each side in a process of its own;
"stacked" holds the features of all views, as one would without an accumulator.
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
from regista.methods.phreg import denoise, sample_views

MODEL = "vit_small_patch14_dinov2"


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--views", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--size", type=int, default=518)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", choices=("bare", "denoise", "stacked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = workloads(options.batch_size, options.views, options.size)
    if options.memory:
        print(peak_over_idle(runs[options.memory]))
        return
    figures = speeds(runs, options.repeats) | memory(options)
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def workloads(batch_size: int, num_views: int, size: int) -> dict[str, Callable[[], object]]:
    """Bare forwards, denoising, and a mean over stacked features, of the same images."""
    torch.manual_seed(0)
    module = timm.create_model(MODEL, pretrained=False, img_size=size).eval()
    backbone = regista.load(module)
    pixels = torch.randn(batch_size, 3, size, size)
    views = sample_views(backbone.layout((size, size)).grid_size, num_views, generator=torch.Generator().manual_seed(1))
    distinct = len({(*offset, flip) for offset, flip in zip(views[0].tolist(), views[1].tolist(), strict=True)})
    assert distinct == num_views, "a view comes twice, so denoising would have less to do"

    def bare() -> None:
        with torch.inference_mode():
            for _ in range(num_views):
                module.forward_features(pixels)

    def stacked() -> None:
        with torch.inference_mode():
            torch.stack([module.forward_features(pixels) for _ in range(num_views)]).mean(0)

    return {"bare": bare, "denoise": lambda: denoise(backbone, pixels, views=views), "stacked": stacked}


def speeds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, object]:
    """Median seconds of each side, and the medians of the ratios of denoising to the bare forwards.

    The ratio of processor seconds leaves out the time in which other programs had the processor.
    """
    clocks = {"": time.perf_counter, "processor ": time.process_time}
    taken: dict[str, dict[str, list[float]]] = {clock: {"bare": [], "denoise": []} for clock in clocks}
    for name in ("bare", "denoise"):
        runs[name]()
    for repeat in range(repeats):
        for name in ("bare", "denoise") if repeat % 2 else ("denoise", "bare"):  # who goes first changes
            starts = {clock: now() for clock, now in clocks.items()}
            runs[name]()
            for clock, now in clocks.items():
                taken[clock][name].append(now() - starts[clock])
    figures: dict[str, object] = {"threads": torch.get_num_threads(), "repeats": repeats}
    for clock, sides in taken.items():
        ratios = [own / bare for own, bare in zip(sides["denoise"], sides["bare"], strict=True)]
        figures |= {f"{name} {clock}s": round(statistics.median(seconds), 3) for name, seconds in sides.items()}
        figures |= {f"{clock}ratio": round(statistics.median(ratios), 3)}
        figures |= {f"{clock}ratios": [round(ratio, 3) for ratio in ratios]}
    return figures


def memory(options: argparse.Namespace) -> dict[str, object]:
    """Peak over idle resident memory of each side in MiB."""
    peaks = {}
    for name in ("bare", "denoise", "stacked"):
        command = [__file__, "--memory", name, "--views", str(options.views)]
        command += ["--batch-size", str(options.batch_size), "--size", str(options.size)]
        command += ["--threads", str(options.threads)]
        peaks[name] = peak_of_script(command)
    return {f"{name} peak MiB": round(peak, 1) for name, peak in peaks.items()}


if __name__ == "__main__":
    main()
