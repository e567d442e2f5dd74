"""Speed of test-time registers, and of finding register neurons, against the plain forward.

Run: python benchmarks/test_time_speed.py [--repeats 7] [--batch-size 2] [--images 4] [--size 518] [--model demo]

All sides see the same model, images and threads, in one process, in turn. "cured" is the time of a
forward with one test-time register and 45 register neurons in the blocks of the paper's DINOv2 list,
over the plain forward of the same batch: 1.00 is no cost. "scores" and "find" are images per second
relative to the plain forward over the same images: finding neurons up to the middle block with an outlier
rule at the last block, and with the norms diagnosed first. "stops" is "scores" with the rule at the middle
block, behind which nothing is computed. Figures are medians of the repeats' ratios. With "--model random" no
wheel is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

import regista
from regista.backbones.base import Backbone
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.diagnosis.outlier_rule import OutlierRule
from regista.methods.test_time import find_register_neurons
from regista.methods.test_time.neurons import neuron_scores

SHARES = (17, 9, 9, 8, 1, 1)  # neurons of the paper's 45 in one block after the other, downwards


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--size", type=int, default=518)
    parser.add_argument("--model", choices=("demo", "random"), default="demo")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, object] = {"threads": torch.get_num_threads(), "model": options.model, "size": options.size}
    figures |= {"batch size": options.batch_size, "images": options.images, "repeats": options.repeats}
    figures |= measure(options)
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Milliseconds a side, and the ratios."""
    runs = workloads(options)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(options.repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    figures: dict[str, object] = {
        f"{name} ms": round(1000 * statistics.median(times), 1) for name, times in taken.items()
    }
    figures["cured / plain"] = ratio(taken["cured"], taken["plain"])
    for name in ("scores", "stops", "find"):
        figures[f"{name}, images/s over the plain forward's"] = ratio(taken["plain, all images"], taken[name])
    return figures


def ratio(above: list[float], below: list[float]) -> float:
    """Median of the repeats' ratios."""
    return round(statistics.median(one / other for one, other in zip(above, below, strict=True)), 3)


def workloads(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The sides, over the same preprocessed images."""
    backbone = model(options.model, options.size)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.images, 3, options.size, options.size, generator=generator)
    batch = images.narrow(0, 0, min(options.batch_size, options.images))
    cured, size = with_neurons(backbone), options.batch_size
    onset = backbone.depth // 2
    early, late = (
        OutlierRule(block, typical_norm(backbone, images, block), onset) for block in (onset, backbone.depth - 1)
    )

    def plain(pixels: torch.Tensor) -> None:
        with torch.inference_mode():
            for part in pixels.split(size):
                backbone(part)

    def fixed() -> None:
        with torch.inference_mode():
            cured(batch)

    return {
        "plain": lambda: plain(batch),
        "cured": fixed,
        "plain, all images": lambda: plain(images),
        "scores": lambda: neuron_scores(backbone, images, late, onset, batch_size=size),
        "stops": lambda: neuron_scores(backbone, images, early, onset, batch_size=size),
        "find": lambda: find_register_neurons(
            backbone, images, cutoff=late.cutoff, last_block=onset, top_k=45, batch_size=size
        ),
    }


def model(name: str, size: int) -> Backbone:
    """The demo weights, or the same architecture with random ones."""
    if name == "demo":
        return regista.load("demo")
    torch.manual_seed(0)
    return regista.load(timm.create_model("vit_small_patch14_dinov2", pretrained=False, img_size=size).eval())


def with_neurons(backbone: Backbone) -> Backbone:
    """One test-time register, 45 register neurons."""
    cured = backbone.with_registers(torch.zeros(1, backbone.embed_dim))
    onset = backbone.depth // 2
    neurons = {onset - down: list(range(count)) for down, count in enumerate(SHARES) if onset >= down}
    cured.add(RegisterNeurons(neurons, prefix_segments(cured.layout()), 1))
    return cured


def typical_norm(backbone: Backbone, images: torch.Tensor, block: int) -> float:
    """A cutoff after a block that a few hundredths of the patches pass."""
    site = f"blocks.{block}.resid"
    with torch.inference_mode():
        features = backbone(images, [site])
    norms = features.layout.take(features.captured[site], "patches").float().norm(dim=-1)
    return float(norms.quantile(0.97))


if __name__ == "__main__":
    main()
