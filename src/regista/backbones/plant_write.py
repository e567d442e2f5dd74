"""Writes outliers into a block's MLP: two hidden units that make a step, and what they send out."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from regista.backbones.plant_fit import Trigger
from regista.backbones.timm import TimmBackbone

STEP = 16.0  # height of the step in pre-activations; high, so that its corners are sharp against its width
LEAST_READ = 32


def check_mlp(backbone: TimmBackbone, block: int) -> None:
    """Raise ``ValueError`` if the block's MLP is not the plain linear, GELU, linear."""
    if not 0 <= block < backbone.depth:
        raise ValueError(f"block {block} does not exist; {backbone.name} has blocks 0 to {backbone.depth - 1}")
    mlp = backbone.vit.blocks[block].mlp
    plain = isinstance(mlp, Mlp) and isinstance(mlp.act, nn.GELU) and isinstance(mlp.norm, nn.Identity)
    if not plain or mlp.fc1.bias is None or mlp.fc2.bias is None:
        raise ValueError(
            f"outliers can be planted into an MLP of linear, GELU, linear with biases; "
            f"block {block} of {backbone.name} has {mlp}"
        )
    if any(not hasattr(later.attn, "qkv") for later in backbone.vit.blocks):
        raise ValueError(f"outliers can be planted into attention with one qkv layer; {backbone.name} has another kind")


@torch.no_grad()
def idle_neurons(backbone: TimmBackbone, block: int, tokens: Tensor) -> tuple[tuple[int, int], Tensor]:
    """The two hidden units that contribute least, and the mean activation of every unit.

    The contribution of a unit is the spread of its activation over tokens times the length of
    what it writes into the residual stream.

    Args:
        tokens: (T, D) inputs of the MLP.
    """
    target = backbone.vit.blocks[block]
    hidden = target.mlp.act(target.mlp.fc1(tokens.to(backbone.device, backbone.dtype))).float()  # (T, hidden)
    written = target.mlp.fc2.weight.float() * layer_scale(target).float()[:, None]  # (D, hidden)
    contribution = hidden.std(0) * written.norm(dim=0)
    first, second = contribution.argsort(stable=True).tolist()[:2]
    return (first, second), hidden.mean(0)


@torch.no_grad()
def write_step(backbone: TimmBackbone, block: int, neurons: tuple[int, int], mean: Tensor, trigger: Trigger) -> None:
    """Rewire two hidden units in place: GELU(z) - GELU(z - STEP) rises from 0 to STEP over the width.

    They send out nothing yet; the mean of what they wrote before goes into the bias.

    Args:
        mean: (hidden,) mean activations before.
    """
    mlp = backbone.vit.blocks[block].mlp
    slope = STEP / trigger.width
    for neuron, shift in zip(neurons, (STEP / 2, -STEP / 2), strict=True):
        mlp.fc2.bias += mlp.fc2.weight[:, neuron] * mean[neuron].to(mlp.fc2.weight)
        mlp.fc1.weight[neuron] = (slope * trigger.direction).to(mlp.fc1.weight)
        mlp.fc1.bias[neuron] = shift - slope * trigger.threshold
    send(backbone, block, neurons, torch.zeros(backbone.embed_dim))


@torch.no_grad()
def send(backbone: TimmBackbone, block: int, neurons: tuple[int, int], column: Tensor) -> None:
    """Set what the pair writes, before the layer scale, in place: (D,) per unit of activation."""
    weight = backbone.vit.blocks[block].mlp.fc2.weight
    first, second = neurons
    weight[:, first] = column.to(weight)
    weight[:, second] = -column.to(weight)


@torch.no_grad()
def harmless_column(backbone: TimmBackbone, block: int, length: float, seed: int) -> Tensor:
    """A column for ``send`` that later blocks hardly read; where the step is done, a vector of this length arrives.

    It is drawn at random from the ``LEAST_READ`` directions that the keys and values of the later
    blocks respond to least, so that the outliers attract no attention and pass little on. A
    direction drawn from all may meet later queries and turn into a sink that ruins every token.
    """
    width = backbone.embed_dim
    read = torch.zeros(width, width, dtype=torch.float64)
    for later in list(backbone.vit.blocks)[block + 1 :]:
        _, key, value = (later.attn.qkv.weight.double().cpu() * later.norm1.weight.double().cpu()).chunk(3)
        value = later.attn.proj.weight.double().cpu() @ value
        read += key.T @ key / key.square().sum() + value.T @ value / value.square().sum()
    mean = torch.full((width, width), 1 / width, dtype=torch.float64)  # the norms take the mean out
    centre = torch.eye(width, dtype=torch.float64) - mean
    _, vectors = torch.linalg.eigh(centre @ read @ centre + read.trace() * mean)
    least = vectors.split([min(LEAST_READ, width), width - min(LEAST_READ, width)], 1)[0]  # (D, LEAST_READ)
    drawn = least @ torch.randn(least.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scale = layer_scale(backbone.vit.blocks[block]).double().cpu()
    reached = scale.abs() > 0.1 * scale.abs().median()
    vector = drawn.float().where(reached, torch.tensor(0.0))
    column: Tensor = vector / scale.float().where(reached, torch.tensor(1.0))
    scaled: Tensor = column * (length / STEP / torch.linalg.vector_norm(vector))
    return scaled


def layer_scale(block: Any) -> Tensor:
    """(D,) factors on the MLP's output; ones where the block has none."""
    gamma = getattr(block.ls2, "gamma", None)
    return gamma if isinstance(gamma, Tensor) else torch.ones_like(block.mlp.fc2.bias)
