"""What test-time registers do to planted outliers, and what untrained registers do to a clean model.

Run: python benchmarks/test_time_cure.py [--images 10] [--size 224] [--out FILE.json]

"left" is how many patches are above the cutoff that told the planted outliers. "cosine" is the mean cosine
similarity of final patch tokens with those of the same weights before outliers were planted; for "trained"
with those of the clean model before registers were inserted.
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
from regista.data.photos import installed_photos
from regista.diagnosis.known_outliers import outlier_count, outlier_rule

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"variant": "released"},
    {"form": "attention-bias"},
    {"registers": 4},
    {"top_k": 10},
    {"top_k": 0},
)


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sick, clean = regista.load("demo-planted"), regista.load("demo")
    paths = [photo.path for photo in installed_photos()][: options.images]
    images = sick.preprocess(paths, image_size=(options.size, options.size))
    rule, wanted = outlier_rule(sick, images), patches(clean, images)
    figures: dict[str, Any] = {"images": len(images), "size": options.size, "outliers": rule.count}
    figures["share of patches"] = round(rule.share, 4)
    figures["planted neurons"] = list(sick.planted.neurons) if sick.planted else []
    figures["planted"] = {"left": rule.count, "cosine": likeness(patches(sick, images), wanted)}
    for settings in VARIANTS:
        cured = regista.fix(sick, "test_time", images, **settings)
        found = cured.history[0]["state"]["neurons"]
        figures[f"test_time {settings or ''}".strip()] = {
            "neurons": len(found),
            "first": [neuron[:2] for neuron in found[:2]],
            "left": outlier_count(cured, images, rule),
            "cosine": likeness(patches(cured, images), wanted),
        }
    for registers in (1, 4, 16):
        inserted = regista.fix(clean, "trained", registers=registers)
        figures[f"trained {registers}"] = {"cosine": likeness(patches(inserted, images), wanted)}
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


@torch.inference_mode()
def patches(backbone: Backbone, images: Tensor) -> Tensor:
    """Final patch tokens (B, P, D)."""
    return torch.cat([backbone(batch).patches for batch in images.split(4)])


def likeness(tokens: Tensor, wanted: Tensor) -> float:
    """Mean cosine similarity of tokens in the same place."""
    return round(float(torch.cosine_similarity(tokens, wanted, dim=-1).mean()), 4)


if __name__ == "__main__":
    main()
