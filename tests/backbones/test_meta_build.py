"""Models that are only names and shapes."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from regista.backbones.meta_build import shapes_only, to_be_filled


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"])
def test_names_and_shapes_are_those_of_a_real_model(name: str) -> None:
    arguments = {"pretrained": False, "depth": 2, "embed_dim": 64, "num_heads": 4}
    with shapes_only():
        shell = timm.create_model(name, **arguments)
    real = timm.create_model(name, **arguments)
    assert {key: value.shape for key, value in shell.state_dict().items()} == {
        key: value.shape for key, value in real.state_dict().items()
    }
    assert all(value.is_meta for value in shell.state_dict().values())
    assert repr(shell) == repr(real)


def test_no_random_numbers_are_drawn() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with shapes_only():
        timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=1)
    assert torch.equal(torch.rand(3), wanted)


def test_real_tensors_are_changed_as_ever_inside() -> None:
    real = torch.zeros(2)
    with shapes_only():
        real.add_(1)
        layer = nn.Linear(2, 2).requires_grad_(False)
    assert real.tolist() == [1, 1]
    assert not layer.weight.requires_grad
    assert nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_a_model_to_be_filled_is_whole_once_it_is(name: str) -> None:
    arguments = {"pretrained": False, "depth": 2, "embed_dim": 64, "num_heads": 4}
    real = timm.create_model(name, **arguments).eval()
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with to_be_filled():
        other = timm.create_model(name, **arguments).eval()
        other.load_state_dict(real.state_dict())
    assert torch.equal(torch.rand(3), wanted)
    assert all(isinstance(parameter, nn.Parameter) for parameter in other.parameters())
    images = torch.rand(1, 3, *real.patch_embed.img_size) if real.patch_embed.img_size else torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(real(images), other(images))


def test_initialisers_are_left_out_only_where_all_is_filled() -> None:
    with to_be_filled(every_parameter=False):
        norm = nn.LayerNorm(8)
    assert norm.weight.tolist() == [1.0] * 8
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        with to_be_filled():
            linear = nn.Linear(4, 4)
            nn.init.normal_(linear.weight)
            drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn[0])  # nothing was drawn for the layer
