"""A saved folder as its own library reads it, without Regista: to check that what was written is what was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.hub_access import reaching_hub


@dataclass(frozen=True)
class BareModel:
    """A model of timm or transformers.

    Attributes:
        module: As the library built it from the folder, in float32, in evaluation mode.
        forward: Preprocessed images (B, 3, H, W) -> tokens (B, N, D) after the last norm.
        expression: Python that gives these tokens out of ``model`` and, in timm, ``pixels`` or, in transformers,
            ``inputs``.
        native_size: (height, width) that it takes without further arguments.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    expression: str
    native_size: tuple[int, int]


def bare_model(folder: Path, library: str) -> BareModel:
    """The model that ``library`` ("timm" or "transformers") builds from a folder.

    Raises:
        ValueError: for another library, or if it cannot read the folder, or a weight is missing in it.
    """
    if library not in ("timm", "transformers"):
        raise ValueError(f"library is timm or transformers, got {library!r}")
    with reaching_hub(str(folder), local=True):
        return _timm(folder) if library == "timm" else _transformers(folder)


def native_size(backbone: Backbone) -> tuple[int, int]:
    """(height, width) of the position table, or what the model was built for; of timm and transformers."""
    module: Any = backbone.module
    if backbone.library == "timm":
        rows, cols = module.patch_embed.grid_size
        return int(rows) * backbone.patch_size, int(cols) * backbone.patch_size
    size = module.config.image_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _timm(folder: Path) -> BareModel:
    import timm

    from regista.backbones.timm import TimmBackbone

    module: Any = timm.create_model(f"local-dir:{folder}", pretrained=True)  # strict by itself
    module.eval()

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            tokens: Tensor = module.forward_features(images)
        return tokens

    size = native_size(TimmBackbone(module, name=str(folder)))
    return BareModel(module, forward, "model.forward_features(pixels)", size)


def _transformers(folder: Path) -> BareModel:
    from transformers import AutoModel

    from regista.backbones.sources import quiet_transformers
    from regista.backbones.transformers import TransformersBackbone

    with quiet_transformers():
        module, found = AutoModel.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
    absent = [key for key in found["missing_keys"] if not key.startswith("pooler.")]
    if absent:
        raise ValueError(f"{len(absent)} weights are missing: {', '.join(absent[:3])}")
    wrapped = TransformersBackbone(module.eval(), name=str(folder))
    inner = next((f".{name}" for name, child in module.named_children() if child is wrapped.vit), "")
    more = ", interpolate_pos_encoding=True" if wrapped.family.asks_for_resizing else ""
    pixels = 'pixel_values=inputs["pixel_values"]' if inner else "**inputs"
    expression = f"model{inner}({pixels}{more}).last_hidden_state"
    if wrapped.family.final_norm is not None:
        expression = f"model{inner}.{wrapped.family.final_norm}({expression})"

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            return wrapped.forward_tokens(images)

    return BareModel(module, forward, expression, native_size(wrapped))
