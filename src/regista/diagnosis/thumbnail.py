"""Small copies of the images for the report."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.base import Backbone

LONG_SIDE = 518


def thumbnails(backbone: Backbone, pixels: Tensor) -> Tensor:
    """The images as the model saw them: (k, 3, H, W) normalised -> (k, h, w, 3) uint8."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    raw = (pixels * std + mean).clamp(0, 1)
    shrink = LONG_SIDE / max(raw.shape[-2:])
    if shrink < 1:
        size = [max(1, round(side * shrink)) for side in raw.shape[-2:]]
        raw = F.interpolate(raw, size=size, mode="bilinear", antialias=True)
    return (raw * 255).round().byte().permute(0, 2, 3, 1)  # (k, h, w, 3)
