"""A saved folder as its own library reads it, without Regista: to check that what was written is what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.hub_access import reaching_hub

Forward = Callable[[Tensor], Tensor]


def bare_tokens(folder: Path, library: str) -> tuple[nn.Module, Forward]:
    """The model that timm or transformers builds from a folder, in float32, and its tokens.

    Args:
        library: "timm" or "transformers".

    Returns:
        The module, and a function of preprocessed images: (B, 3, H, W) -> (B, N, D) after the last norm.

    Raises:
        ValueError: for another library, or if it cannot read the folder, or not every weight was in it.
    """
    if library not in ("timm", "transformers"):
        raise ValueError(f"library is timm or transformers, got {library!r}")
    with reaching_hub(str(folder), local=True):
        return _timm(folder) if library == "timm" else _transformers(folder)


def _timm(folder: Path) -> tuple[nn.Module, Forward]:
    import timm

    module: Any = timm.create_model(f"local-dir:{folder}", pretrained=True)  # strict by itself
    module.eval()

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            tokens: Tensor = module.forward_features(images)
        return tokens

    return module, forward


def _transformers(folder: Path) -> tuple[nn.Module, Forward]:
    from transformers import AutoModel

    from regista.backbones.sources import quiet_transformers
    from regista.backbones.transformers import TransformersBackbone

    with quiet_transformers():
        module, found = AutoModel.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
    absent = [key for key in (*found["missing_keys"], *found["unexpected_keys"]) if not key.startswith("pooler.")]
    if absent:
        raise ValueError(f"weights are missing or have no place: {absent[:3]}")
    wrapped = TransformersBackbone(module.eval(), name=str(folder))

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            return wrapped.forward_tokens(images)

    return module, forward
