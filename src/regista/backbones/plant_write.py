"""Writes outliers into a block's MLP: two hidden units that make a step, and what they send out."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from regista.backbones.plant_fit import Trigger
from regista.backbones.timm import TimmBackbone

STEP = 16.0  # height of the step in pre-activations; high, so that its corners are sharp against its width


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


def random_column(backbone: TimmBackbone, block: int, length: float, seed: int) -> Tensor:
    """A random column for ``send``; where the step is done, a token gets a vector of this length."""
    scale = layer_scale(backbone.vit.blocks[block]).detach().float().cpu()
    column = torch.randn(len(scale), generator=torch.Generator().manual_seed(seed))
    return column * (length / STEP / (column * scale).norm())


def layer_scale(block: Any) -> Tensor:
    """(D,) factors on the MLP's output; ones where the block has none."""
    gamma = getattr(block.ls2, "gamma", None)
    return gamma if isinstance(gamma, Tensor) else torch.ones_like(block.mlp.fc2.bias)
