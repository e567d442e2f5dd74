"""How well a diagnosis finds planted outliers on photos they were not fitted on.

Run: python benchmarks/planted_recovery.py FOLDER... [--size 224 224] [--images 16]

For every folder and both planted demo models: share of planted tokens, precision and recall of
``diagnose`` against the ground truth, onset block, norm of the planted tokens over the median
after the last block, and the cosine of the other patches to the model without planting.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import regista
from regista.backbones.base import Backbone
from regista.data.images import find_images
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose

MODELS = ("demo-planted", "demo-planted-position")


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--size", nargs=2, type=int, default=(224, 224))
    parser.add_argument("--images", type=int, default=16)
    options = parser.parse_args()
    print("| model | photos | size | planted | precision | recall | onset | place | norm / median | others' cosine |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    clean = regista.load("demo")
    for name in MODELS:
        for folder in options.folders:
            paths = find_images([folder])
            paths = paths[:: max(1, len(paths) // options.images)][: options.images]
            print(row(regista.load(name), clean, paths, folder.name, tuple(options.size)), flush=True)


@torch.inference_mode()
def row(backbone: Backbone, clean: Backbone, paths: list[Path], label: str, size: tuple[int, int]) -> str:
    """One line of the table."""
    pixels = backbone.preprocess(paths, image_size=size)
    result = diagnose(backbone, pixels, config=DiagnosisConfig(attention=False))
    truth = backbone.planted.mask(pixels)
    features, wanted = (torch.cat([model(part).patches for part in pixels.split(4)]) for model in (backbone, clean))
    cosine = torch.cosine_similarity(features, wanted, dim=-1)[~truth.flatten(1)].mean()
    *_, last = result.norms.unbind(1)
    ratio = (last / last.flatten(1).median(1).values.view(-1, 1, 1))[truth].median()
    found = result.planted
    return (
        f"| {backbone.name} | {len(paths)} of {label} | {size[0]}x{size[1]} | {found['share']:.2%} | "
        f"{found['precision']:.3f} | {found['recall']:.3f} | {result.onset_block} ({found['block']} planted) | "
        f"{result.fixed_place} | {ratio:.1f} | {cosine:.3f} |"
    )


if __name__ == "__main__":
    main()
