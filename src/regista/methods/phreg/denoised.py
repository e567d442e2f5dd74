"""Denoising at inference as a cure: the patch tokens are the mean over shifted views."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regista.backbones.additions import Addition
from regista.methods.phreg.computing import image_views
from regista.methods.phreg.denoising import denoise

if TYPE_CHECKING:
    from regista.backbones.base import Backbone


class DenoisedViews(Addition):
    """Final patch tokens are denoised; CLS, registers and captured sites are those of the image itself.

    Works through the adapter: ``backbone.module`` alone gives the raw tokens. The views are drawn once
    for each grid from the seed, so an image has the same features in every batch.

    Args:
        num_views, shift_ratio, seed: See ``regista.methods.phreg.denoise``.
    """

    kind = "denoised-views"
    reason = "its patch tokens are means over shifted views, which are made at every forward"

    def __init__(self, num_views: int, shift_ratio: float, seed: int) -> None:
        super().__init__()
        self.num_views, self.shift_ratio, self.seed = num_views, shift_ratio, seed

    def hang(self, backbone: Backbone) -> None:
        """Nothing hangs on the module."""

    def bind(self, backbone: Backbone) -> None:
        """Put the denoising around the adapter's forward."""
        vars(backbone)["forward_tokens"] = partial(self.forward_tokens, backbone)

    def forward_tokens(self, backbone: Backbone, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, N, D)."""
        plain = copy.copy(backbone)
        vars(plain).pop("forward_tokens", None)
        layout = backbone.layout((images.shape[-2], images.shape[-1]))
        views = image_views(self.seed, 0, layout.grid_size, self.num_views, self.shift_ratio)

        def patches(_backbone: Backbone, pixels: Tensor) -> Tensor:
            return layout.take(plain.forward_tokens(pixels), "patches")

        denoised = denoise(plain, images, views=views, features=patches)
        tokens = plain.forward_tokens(images)  # last, so that captures are those of the image
        return layout.join({**layout.split(tokens), "patches": denoised.to(tokens.dtype)})

    def to_record(self) -> dict[str, Any]:
        """The settings."""
        settings = {"num_views": self.num_views, "shift_ratio": self.shift_ratio, "seed": self.seed}
        return {"kind": self.kind, **settings}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> DenoisedViews:
        """The same settings."""
        return cls(int(record["num_views"]), float(record["shift_ratio"]), int(record["seed"]))
