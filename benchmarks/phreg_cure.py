"""What PH-Reg does to planted outliers, on photos it did not see.

Run: python benchmarks/phreg_cure.py PHOTOS [--model demo-planted-position] [--images 60] [--judge 32] [--size 224]
         [--out FILE.json] [key=value ...]

Of the folder's photos, in the order of their names, the first are given to ``phreg`` (which holds a tenth of them
out for its learning rate) and the last are judged. "cells" are those where an outlier was planted, "others" all
the rest; cosines are those of final patch tokens to the same weights before planting. "share" is that of patches
which the rule learned on the planted model calls outliers, "diagnosed" that of a new diagnosis.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regista
from regista.backbones.base import Backbone
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.known_outliers import OutlierRule, outlier_rule
from regista.methods.phreg import denoise
from regista.methods.settings import parsed


def main() -> None:
    """Cure, measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--model", default="demo-planted-position")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--judge", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    photos = sorted(options.photos.glob("*.jpg"))
    given, judged = photos[: options.images], photos[-options.judge :]
    if set(given) & set(judged):
        parser.error(f"{len(photos)} photos are too few to judge on others than those given")
    settings = {"registers": 8, **parsed(options.settings)}
    size = (options.size, options.size)
    sick, clean = regista.load(options.model, image_size=size), regista.load("demo", image_size=size)
    pixels = sick.preprocess(judged, policy="crop")
    rule = outlier_rule(sick, pixels)
    start = time.perf_counter()
    cured = regista.fix(sick, "phreg", given, **settings)
    minutes = (time.perf_counter() - start) / 60
    record = cured.history[-1]
    figures: dict[str, Any] = {
        "model": options.model,
        "photos": len(given),
        "judged": len(judged),
        "settings": settings,
        "minutes": round(minutes, 2),
        "threads": torch.get_num_threads(),
        "lr": record["state"]["lr"],
        "lr tried": record["state"]["lr_tried"],
        "before": figures_of(sick, sick, clean, pixels, rule),
        "target": figures_of(None, sick, clean, pixels, rule),
        "after": figures_of(cured, sick, clean, pixels, rule),
    }
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


@torch.no_grad()
def figures_of(
    model: Backbone | None, sick: Backbone, clean: Backbone, pixels: Tensor, rule: OutlierRule
) -> dict[str, float]:
    """Cosines and shares of a model, or the cosines of the denoised features of the sick one."""
    assert sick.planted is not None
    truth = sick.planted.mask(pixels).flatten(1)
    if model is None:
        patches = torch.cat(
            [denoise(sick, image, generator=seeded(index)) for index, image in enumerate(pixels.split(1))]
        )
    else:
        patches = torch.cat([model(batch).patches for batch in pixels.split(8)])
    wanted = torch.cat([clean(batch).patches for batch in pixels.split(8)])
    cosine = torch.cosine_similarity(patches, wanted, dim=-1)
    found = {"cells": float(cosine[truth].mean()), "others": float(cosine[~truth].mean())}
    if model is not None:
        found["share"] = float(torch.cat([rule.mask(model, batch) for batch in pixels.split(8)]).float().mean())
        found["diagnosed"] = regista.diagnose(model, pixels, config=DiagnosisConfig(attention=False)).share
    return {name: round(value, 5) for name, value in found.items()}


def seeded(seed: int) -> torch.Generator:
    """Views of an image, the same in every run."""
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    main()
