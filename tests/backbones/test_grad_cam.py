from __future__ import annotations

import numpy as np
import pytest
import timm
import torch

from regista import reshape_transform
from regista.backbones.tiny import tiny_vit


def test_maps_are_those_of_the_layout() -> None:
    backbone = tiny_vit(num_register_tokens=4)
    tokens = torch.randn(2, 5 + 20, 64)
    maps = reshape_transform(backbone, (56, 70))(tokens)
    assert maps.shape == (2, 64, 4, 5)
    assert torch.equal(maps[0, :, 1, 2], tokens[0, 5 + 1 * 5 + 2])


def test_other_sizes_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"30.*69"):
        reshape_transform(tiny_vit(num_register_tokens=4))(torch.randn(1, 30, 64))


def test_grad_cam_takes_it_as_it_is() -> None:
    grad_cam = pytest.importorskip("pytorch_grad_cam")
    model = timm.create_model(
        "vit_small_patch14_reg4_dinov2", img_size=(42, 56), depth=2, embed_dim=32, num_heads=2, num_classes=3
    ).eval()
    transform = reshape_transform(model, (42, 56))
    with grad_cam.GradCAM(model, [model.blocks[-1].norm1], reshape_transform=transform) as cam:
        shown = cam(torch.randn(2, 3, 42, 56), targets=None)
    assert shown.shape == (2, 42, 56)
    assert np.isfinite(shown).all()
