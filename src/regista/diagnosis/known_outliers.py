"""A rule that tells outlier tokens, learned on one model and applied to another."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regista.backbones.base import Backbone
from regista.data.images import find_images
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose
from regista.diagnosis.measuring import token_norms
from regista.diagnosis.outliers import MANY
from regista.diagnosis.source import ImageSource

SAMPLED = 32


@dataclass(frozen=True)
class OutlierRule:
    """Which patches are outliers: those whose norm after ``block`` is above ``cutoff``.

    Attributes:
        onset: The first block whose output has them.
        count: How many there were on the images it was learned on.
        share: The same as a share of the patches.
    """

    block: int
    cutoff: float
    onset: int
    count: int = 0
    share: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def mask(self, backbone: Backbone, pixels: Tensor) -> Tensor:
        """Preprocessed images (B, 3, H, W) -> bool (B, P)."""
        layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))
        site = f"blocks.{self.block}.resid"
        norms = backbone(pixels, {site: token_norms}).captured[site]
        return layout.take(norms, "patches", dim=-1) > self.cutoff


def outlier_rule(
    backbone: Backbone,
    images: Any,
    *,
    cutoff: float | None = None,
    batch_size: int = 8,
    image_size: tuple[int, int] | None = None,
) -> OutlierRule:
    """Diagnose norms: from which block on there are outliers, and which norm tells them.

    Args:
        images: As ``diagnose`` takes them.
        cutoff: Use this norm instead of the one found.
        image_size: (height, width) of files and PIL images; the model's own by default.

    Raises:
        ValueError: if there are none.
    """
    size = None if image_size is None else list(image_size)
    config = DiagnosisConfig(batch_size=batch_size, cutoff=cutoff, attention=False, image_size=size)
    found = diagnose(backbone, images, config=config)
    if found.outlier_block is None or found.onset_block is None or found.cutoff is None:
        raise ValueError(
            f"{backbone.name} shows no outlier tokens on these {found.images['count']} images; "
            "look with regista diagnose, or give a cutoff"
        )
    count = int(found.outliers.sum())
    return OutlierRule(found.outlier_block, found.cutoff, found.onset_block, count, found.share)


def too_many(share: float) -> tuple[str, ...]:
    """A caution if more than a tenth of the patches count as outliers."""
    if share <= MANY:
        return ()
    return (f"{share:.0%} of the patches count as outliers, more than a tenth: that many are rarely outliers",)


def some_of(images: Any, most: int = SAMPLED) -> Any:
    """At most so many of the images, evenly spread; what ``outlier_rule`` needs is seen on a few dozen.

    Args:
        images: As ``diagnose`` takes them, but no iterator.
    """
    if isinstance(images, (str, Path, Image.Image, np.ndarray)):
        images = [images]
    if not isinstance(images, Tensor) and all(isinstance(image, (str, Path)) for image in images):
        images = find_images(images)
    if len(images) <= most:
        return images
    places = torch.linspace(0, len(images) - 1, most).round().long().tolist()
    return images[places] if isinstance(images, Tensor) else [images[place] for place in places]


@torch.inference_mode()
def outlier_count(backbone: Backbone, images: Any, rule: OutlierRule, batch_size: int = 8) -> int:
    """How many patches of some images the rule calls outliers."""
    count = 0
    for pixels, valid in ImageSource(backbone, images, DiagnosisConfig(batch_size=batch_size)):
        mask = rule.mask(backbone, pixels)
        count += int((mask & valid.flatten(1).to(mask.device)).sum())
    return count
