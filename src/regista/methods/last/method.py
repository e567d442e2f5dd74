"""Read an image vector out of the patches by selective pooling; nothing is trained, no token changes."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.features import Features
from regista.backbones.selective_read_out import SelectiveReadOut
from regista.layers.selective_pool import SelectivePool
from regista.methods.last.config import LastConfig
from regista.methods.protocol import Method, Progress, State, Workspace


class Last(Method):
    """The pooling of LAST-ViT (2602.22394) as a read-out of a trained model."""

    name = "last"
    summary = "the image vector becomes a selective pooling of the patches; tokens stay as they are"
    config_class = LastConfig
    needs_images = False

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        SelectivePool(self.config.k, self.config.variant, self.config.eps)  # refuses wrong settings at once

    def outline(self, backbone: Backbone) -> Backbone:
        """The result itself."""
        return self.apply(backbone, self.fit(backbone))

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Nothing to learn; no image is looked at."""
        config: LastConfig = self.config
        return State({"k": config.k, "variant": config.variant, "eps": config.eps})

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """A copy whose ``global_vector`` is the pooling; one that was there before is replaced."""
        new = copy.deepcopy(backbone)
        for name, child in list(new.module.named_children()):
            if isinstance(child, SelectiveReadOut):
                delattr(new.module, name)
                new.additions.remove(child)
        new.add(SelectiveReadOut(state.record["k"], state.record["variant"], float(state.record["eps"])))
        return new


def patch_votes(backbone: Backbone, features: Features) -> Tensor:
    """In how many channels the read-out picked each patch: (B, rows, cols) int64.

    Args:
        backbone: A model fixed with ``last``.
        features: What it gave for the images.

    Raises:
        ValueError: for a model without the read-out.
    """
    for addition in backbone.additions:
        if isinstance(addition, SelectiveReadOut):
            return addition.votes(features.tokens, features.layout)
    raise ValueError(f"{backbone.name} has no selective pooling; use regista.fix(backbone, 'last') first")


METHOD = Last
