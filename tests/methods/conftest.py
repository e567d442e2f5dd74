"""A tiny model whose outliers are known, and images for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista.backbones.timm import TimmBackbone
from tests.backbones.planting import SOUTH


@pytest.fixture(scope="package")
def _planted() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    backbone = regista.load("tiny-planted")
    torch.set_num_threads(threads)
    return backbone


@pytest.fixture
def sick(_planted: Any) -> TimmBackbone:
    """The tiny model with planted outliers; a copy, whose truth is that of the original."""
    backbone: TimmBackbone = copy.deepcopy(_planted)
    return backbone


@pytest.fixture(scope="package")
def images() -> Tensor:
    """Preprocessed images that it was not planted on."""
    return SOUTH.images(7)


@pytest.fixture
def norms() -> Callable[[Any, Tensor, int], Tensor]:
    """Patch norms after a block, one image at a time: (B, P)."""

    def measured(backbone: Any, pixels: Tensor, block: int) -> Tensor:
        found = []
        for image in pixels.split(1):
            features = backbone(image, [f"blocks.{block}.resid"])
            found.append(features.layout.take(features.captured[f"blocks.{block}.resid"], "patches").norm(dim=-1))
        return torch.cat(found).detach()

    return measured
