"""How much planted outliers change the image vector: CLS, mean and selective pooling, untrained.

Run: python benchmarks/selective_read_out.py PHOTOS [--images 24] [--size 224] [--out FILE.json]

"cosine" is that of the image vector to the same read-out of the same weights before planting, averaged over
photos (each vector less the mean of the clean vectors, so that what all photos share does not count).
"picked" is the share of the pooling's picks, over all channels, that fall on planted cells; "planted" is the
share of such cells, which a blind choice would pick.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regista
from regista.backbones.base import Backbone
from regista.methods.last.method import patch_votes

MODELS = ("demo-planted", "demo-planted-position")
POOLS: dict[str, dict[str, Any]] = {
    "last, a quarter of the patches": {},
    "last, K = 1": {"k": 1},
    "last, K = 1, released score": {"k": 1, "variant": "released"},
}


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clean = regista.load("demo", image_size=(options.size, options.size))
    pixels = clean.preprocess(sorted(options.photos.glob("*.jpg"))[: options.images])
    rows = []
    for name in MODELS:
        sick = regista.load(name, image_size=(options.size, options.size))
        rows += [{"model": name, **row} for row in figures(sick, clean, pixels)]
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def figures(sick: Backbone, clean: Backbone, pixels: Tensor) -> list[dict[str, Any]]:
    """A row a read-out."""
    truth = sick.planted.mask(pixels).flatten(1) if sick.planted else None
    assert truth is not None
    found, wanted = sick(pixels), clean(pixels)
    assert found.cls is not None
    assert wanted.cls is not None
    rows = [
        {"read-out": "CLS", "cosine": likeness(found.cls, wanted.cls)},
        {"read-out": "mean of the patches", "cosine": likeness(found.patches.mean(1), wanted.patches.mean(1))},
    ]
    for name, config in POOLS.items():
        pooled, reference = (regista.fix(model, "last", **config) for model in (sick, clean))
        vectors = [
            model.global_vector(side.tokens, side.layout) for model, side in ((pooled, found), (reference, wanted))
        ]
        votes = patch_votes(pooled, found).flatten(1).double()
        row: dict[str, Any] = {"read-out": name, "cosine": likeness(*vectors)}
        row |= {
            "picked": round(float(votes[truth].sum() / votes.sum()), 4),
            "planted": round(float(truth.double().mean()), 4),
        }
        rows.append(row)
    return rows


def likeness(vectors: Tensor, wanted: Tensor) -> float:
    """Mean cosine around the mean of the wanted ones."""
    middle = wanted.mean(0)
    return round(float(torch.cosine_similarity(vectors - middle, wanted - middle, dim=-1).mean()), 4)


if __name__ == "__main__":
    main()
