"""Insertion of registers that are to be trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import regista
from regista.backbones.tiny import tiny_vit
from regista.methods.trained.config import TrainedConfig
from regista.methods.trained.method import initial_registers
from tests.backbones.probes import close, pictures, randomise, unchanged
from tests.backbones.test_transformers import MODELS, TransformersBackbone


def test_registers_are_inserted_and_nothing_else_changes() -> None:
    backbone = tiny_vit(num_register_tokens=1)
    images = pictures(backbone)
    with unchanged(backbone.module):
        new = regista.fix(backbone, "trained", registers=3, seed=5)
    assert new.num_register_tokens == 4
    table = new.register_table()
    assert table is not None
    close(table.detach().squeeze(0).narrow(0, 1, 3), initial_registers(3, 64, seed=5), 0)
    assert table.requires_grad
    with new.hiding_registers(keep=1):
        close(new(images).patches, backbone(images).patches, 1e-5)
    assert new.needs_regista is None
    assert json.loads(json.dumps(new.history))[0]["config"] == {"registers": 3, "std": 1.0, "seed": 5}
    assert any("untrained" in note for note in new.notes)


def test_no_registers_change_no_bit() -> None:
    backbone = tiny_vit()
    images = pictures(backbone)
    new = regista.fix(backbone, "trained", registers=0)
    assert new is not backbone
    assert torch.equal(new(images).tokens, backbone(images).tokens)


@pytest.mark.parametrize("kind", ["clip", "siglip", "vit", "dinov2", "dinov3 0"])
def test_every_kind_of_model(kind: str) -> None:
    backbone = TransformersBackbone(randomise(MODELS[kind](), scale=0.5), name=kind)
    new: Any = regista.fix(backbone, "trained")
    images = pictures(backbone)
    assert new(images).registers.shape == (2, 4, backbone.embed_dim)
    new(images).patches.square().mean().backward()
    gradients = new.register_table().grad.squeeze(0)
    assert (gradients.abs().sum(-1) > 0).all()
    for first in range(4):  # registers that started alike would learn the same
        for second in range(first):
            assert not torch.allclose(gradients[first], gradients[second])


def test_the_registers_are_random_and_reproducible() -> None:
    first = initial_registers(400, 64, std=2.0, seed=1)
    assert torch.equal(first, initial_registers(400, 64, std=2.0, seed=1))
    assert not torch.equal(first, initial_registers(400, 64, std=2.0, seed=2))
    assert float(first.std()) == pytest.approx(2.0 / 8, rel=0.02)
    assert float(first.norm(dim=-1).mean()) == pytest.approx(2.0, rel=0.02)
    before = torch.random.get_rng_state()
    initial_registers(2, 8)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert initial_registers(0, 8).shape == (0, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"registers": -1}, "0 or more, got -1"),
        ({"registers": True}, "0 or more, got True"),
        ({"std": 0.0}, "equal registers would stay equal"),
        ({"std": float("nan")}, "std is positive, got nan"),
        ({"std": float("inf")}, "std is positive, got inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainedConfig(**settings)
