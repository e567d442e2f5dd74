"""What repairs without training leave of planted outliers, measured against the model as it was before planting.

Run: python benchmarks/repair_on_planted.py PHOTOS [--images 12] [--size 224] [--num-samples 100000] [--out FILE.json]

Of the folder's photos, in the order of their names, the first half is fitted on and the second half
measured. "share" is that of patch tokens with outlier norms. The cosines are those of final patch
features to the same features of the model without the plant: mean over cells where an outlier was
planted, and over all others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import regista
from regista.backbones.base import Backbone
from regista.diagnosis.config import DiagnosisConfig

MODELS = ("demo", "demo-planted", "demo-planted-position")
REPAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "neighbour_average": ("neighbour_average", {}),
    "neighbour_average, gaussian": ("neighbour_average", {"kernel": "gaussian"}),
    "sinder": ("sinder", {}),
    "sinder, normed": ("sinder", {"inputs": "normed"}),
    "sinder, border and single tokens too": ("sinder", {"ignore_border": False, "min_tokens": 1}),
}


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--num-samples", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    photos = sorted(arguments.photos.glob("*.jpg"))
    fitting, others = photos[: arguments.images], photos[arguments.images : 2 * arguments.images]
    size = (arguments.size, arguments.size)
    clean = regista.load("demo", image_size=size)
    pixels = clean.preprocess(others)
    rows = []
    for name in MODELS:
        backbone = regista.load(name, image_size=size)
        rows.append({"model": name, "repair": "none", **figures(backbone, backbone, clean, pixels)})
        print(json.dumps(rows[-1]), flush=True)
        for repair, (method, config) in REPAIRS.items():
            config = {**config, "num_samples": arguments.num_samples} if method == "sinder" else config
            row: dict[str, Any] = {"model": name, "repair": repair}
            try:
                fixed = regista.fix(backbone, method, fitting, **config)
                row |= {"block": fixed.history[-1]["state"]["block"], **figures(fixed, backbone, clean, pixels)}
            except ValueError as error:
                row["refused"] = str(error)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def figures(fixed: Backbone, planted: Backbone, clean: Backbone, pixels: torch.Tensor) -> dict[str, float]:
    """Share of outliers, and cosines to the clean model."""
    found = regista.diagnose(fixed, pixels, config=DiagnosisConfig(attention=False))
    cosine = torch.cosine_similarity(fixed(pixels).patches, clean(pixels).patches, dim=-1)
    if planted.planted is None:
        return {"share": found.share, "cosine_others": float(cosine.mean())}
    truth = planted.planted.mask(pixels).flatten(1)
    return {
        "share": found.share,
        "cosine_outliers": float(cosine[truth].mean()),
        "cosine_others": float(cosine[~truth].mean()),
    }


if __name__ == "__main__":
    main()
