"""The planted models that come with a name: fitted once, then kept in the cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.demo_weights import demo_backbone, demo_fingerprint
from regista.backbones.plant import Kind, plant_outliers, planted_from_metadata
from regista.backbones.plant_photos import fit_photos, photo_crops
from regista.backbones.timm import TimmBackbone
from regista.backbones.weight_cache import fingerprint, read_cached, write_cached

# Raise a number when the fit changes, so that nobody keeps an old one.
FIT_VERSION: dict[Kind, int] = {"content": 3, "position": 5}
CROPS = (((224, 224), 200), ((518, 518), 12), ((336, 448), 12), ((448, 336), 12))
TINY_IMAGES = 120
TINY_SIDES = (8, 3, 5, 9, 2, 40, 17, 2)
TINY_NOISES = 24
TINY_MARK = 0.7


def demo_planted(kind: Kind) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of the demo model with planted outliers, and their record.

    Fitted on crops of the photos in scikit-image and scikit-learn, which takes about a minute;
    cached afterwards, for these photos and this wheel.

    Args:
        kind: "content" or "position", see ``plant_outliers``.

    Raises:
        ValueError: if the wheel or the photos are not installed.
    """
    name = f"demo-planted-{kind}"
    source = fingerprint(FIT_VERSION[kind], kind, CROPS, demo_fingerprint(), *fit_photos())
    cached = read_cached(name, source)
    if cached is not None:
        return cached
    planted = _plant_demo(kind)
    state = {key: value.detach().contiguous() for key, value in planted.module.state_dict().items()}
    metadata = dict(planted.planted.metadata)
    write_cached(name, source, state, metadata)
    return state, metadata


def demo_planted_backbone(kind: Kind, *, image_size: tuple[int, int] | None = None) -> TimmBackbone:
    """The demo model with planted outliers of one kind; see ``demo_planted``."""
    state, metadata = demo_planted(kind)
    backbone = demo_backbone(state, image_size=image_size)
    backbone.name = "demo-planted" if kind == "content" else "demo-planted-position"
    backbone.planted = planted_from_metadata(metadata, backbone)
    return backbone


def plant_tiny(backbone: TimmBackbone) -> TimmBackbone:
    """Plant outliers at fixed cells of a tiny model with random weights; no photo is needed.

    Random weights tell pictures from marks badly, so the mark is longer than in a trained model,
    yet too short to be a high norm by itself.
    """
    return plant_outliers(
        backbone, _synthetic_images(backbone.image_size), "position", share=0.03, mark_length=TINY_MARK
    )


def _plant_demo(kind: Kind) -> Any:
    clean = demo_backbone()
    groups = [
        clean.preprocess(photo_crops(count, size, seed), image_size=size) for seed, (size, count) in enumerate(CROPS)
    ]
    return plant_outliers(clean, groups, kind, ramp=kind == "position")


def _synthetic_images(size: tuple[int, int]) -> Tensor:
    """Smooth and blocky random fields of several scales, and noise, as a ViT may see them: (n, 3, H, W)."""
    draw = torch.Generator().manual_seed(0)
    images = []
    for index in range(TINY_IMAGES):
        side = TINY_SIDES[index % len(TINY_SIDES)]
        field = torch.randn(1, 3, side, side, generator=draw)
        grown = F.interpolate(field, size=size, mode="bilinear" if index % 2 else "nearest")
        contrast, colour = torch.rand(1, generator=draw) * 1.5, torch.randn(1, 3, 1, 1, generator=draw) * 0.7
        images.append((grown * contrast + colour).clamp(-2.1, 2.6))
    return torch.cat([*images, torch.randn(TINY_NOISES, 3, *size, generator=draw)])
