from __future__ import annotations

import pytest
import torch

from regista.backbones.plant_fit import Trigger, mlp_inputs
from regista.backbones.plant_write import (
    STEP,
    check_mlp,
    harmless_column,
    idle_neurons,
    layer_scale,
    send,
    write_step,
)
from tests.backbones.planting import NORTH, tiny_with


def test_idle_neurons_are_those_whose_removal_changes_least() -> None:
    backbone = tiny_with()
    block = backbone.vit.blocks[1]
    tokens = mlp_inputs(backbone, NORTH.images(6), 1).flatten(0, 1)
    neurons, mean = idle_neurons(backbone, 1, tokens)
    with torch.no_grad():
        hidden = block.mlp.act(block.mlp.fc1(tokens))
        torch.testing.assert_close(mean, hidden.mean(0), rtol=0, atol=1e-6)
        whole = block.mlp.fc2(hidden)
        change = []
        for unit in range(hidden.shape[1]):
            without = hidden.clone()
            without[:, unit] = mean[unit]
            change.append(float((block.mlp.fc2(without) - whole).square().sum()))
    assert set(neurons) == set(sorted(range(len(change)), key=change.__getitem__)[:2])


def test_step_rises_over_its_width_and_is_flat_beside_it() -> None:
    backbone = tiny_with()
    mlp = backbone.vit.blocks[1].mlp
    direction = torch.zeros(backbone.embed_dim)
    direction[3] = 2.0
    before = mlp(torch.zeros(1, backbone.embed_dim))
    neurons = (7, 30)
    hidden = mlp.act(mlp.fc1(torch.zeros(1, backbone.embed_dim))).squeeze(0)
    write_step(backbone, 1, neurons, hidden.detach(), Trigger(direction, threshold=5.0, width=0.1))
    # the mean goes into the bias: a token of mean activations is as before
    torch.testing.assert_close(mlp(torch.zeros(1, backbone.embed_dim)), before, rtol=0, atol=1e-5)
    score = torch.tensor([0.0, 4.9, 4.94, 5.0, 5.06, 5.1, 50.0])
    tokens = score[:, None] / 2 * (direction / 2)
    send(backbone, 1, neurons, torch.ones(backbone.embed_dim), saturates=True)
    with torch.no_grad():
        hidden = mlp.act(mlp.fc1(tokens))
        step = (hidden[:, 7] - hidden[:, 30]) / STEP
        written = mlp.fc2.weight[:, 7] * hidden[:, 7:8] + mlp.fc2.weight[:, 30] * hidden[:, 30:31]
    torch.testing.assert_close(step, torch.tensor([0, 0, 0, 0.5, 1, 1, 1]), rtol=0, atol=0.02)
    torch.testing.assert_close(written, (step * STEP)[:, None].expand_as(written), rtol=0, atol=2e-3)


def test_column_has_its_length_and_little_attention() -> None:
    backbone = tiny_with()
    images = NORTH.images(4)
    column = harmless_column(backbone, images, 1, 30.0, seed=0)
    vector = column * STEP * layer_scale(backbone.vit.blocks[1]).detach()
    assert float(vector.norm()) == pytest.approx(30.0, rel=1e-4)
    assert torch.equal(column, harmless_column(backbone, images, 1, 30.0, seed=0))
    assert not torch.allclose(column, harmless_column(backbone, images, 1, 30.0, seed=1))

    def attention_to_it(vector: torch.Tensor) -> float:
        def write(tokens: torch.Tensor) -> torch.Tensor:
            tokens = tokens.clone()
            tokens[:, 20] += vector
            return tokens

        with torch.inference_mode(), backbone.editing({"blocks.1.resid": write}):
            received = backbone(images, ["blocks.2.attn_received"]).captured["blocks.2.attn_received"]
        return float(received[..., 20].mean())

    random = [attention_to_it(30 * torch.nn.functional.normalize(torch.randn(64), dim=0)) for _ in range(12)]
    assert attention_to_it(vector) < sorted(random)[6]


def test_layer_scale_is_taken_into_account() -> None:
    backbone = tiny_with()
    gamma = torch.linspace(0.0, 2.0, backbone.embed_dim)
    scale = torch.nn.Module()
    scale.gamma = torch.nn.Parameter(gamma)
    backbone.vit.blocks[1].ls2 = scale
    scale.forward = lambda x: x * scale.gamma
    column = harmless_column(backbone, NORTH.images(2), 1, 30.0, seed=0)
    assert torch.isfinite(column).all()
    assert float((column * STEP * gamma).norm()) == pytest.approx(30.0, rel=1e-4)
    assert not column[gamma < 0.1].any()  # where the scale lets nothing through


@pytest.mark.parametrize("block", [-1, 3, 4])
def test_the_last_block_and_others_that_are_not_there_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"any block but the last, for tiny 0 to 2; got {block}"):
        check_mlp(tiny_with(), block)


def test_other_mlps_are_refused() -> None:
    backbone = tiny_with()
    backbone.vit.blocks[1].mlp.act = torch.nn.SiLU()
    with pytest.raises(ValueError, match="linear, GELU, linear"):
        check_mlp(backbone, 1)
