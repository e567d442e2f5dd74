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
SHYNESS = 0.3


def check_mlp(backbone: TimmBackbone, block: int) -> None:
    """Raise ``ValueError`` if the block's MLP is not the plain linear, GELU, linear."""
    if not 0 <= block < backbone.depth - 1:
        raise ValueError(
            f"outliers can be planted into any block but the last, "
            f"for {backbone.name} 0 to {backbone.depth - 2}; got {block}"
        )
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
    """Rewire two hidden units in place.

    A step is GELU(z) - GELU(z - STEP), which rises from 0 to STEP over the width; a ramp is twice the
    same GELU(z), each of which reaches STEP at the end of the width and goes on rising. They send
    out nothing yet; the mean of what they wrote before goes into the bias.

    Args:
        mean: (hidden,) mean activations before.
    """
    mlp = backbone.vit.blocks[block].mlp
    slope = STEP / trigger.width
    shifts = (STEP / 2, -STEP / 2) if trigger.saturates else (0.0, 0.0)
    for neuron, shift in zip(neurons, shifts, strict=True):
        mlp.fc2.bias += mlp.fc2.weight[:, neuron] * mean[neuron].to(mlp.fc2.weight)
        mlp.fc1.weight[neuron] = (slope * trigger.direction).to(mlp.fc1.weight)
        mlp.fc1.bias[neuron] = shift - slope * trigger.threshold
    send(backbone, block, neurons, torch.zeros(backbone.embed_dim), saturates=trigger.saturates)


@torch.no_grad()
def send(backbone: TimmBackbone, block: int, neurons: tuple[int, int], column: Tensor, *, saturates: bool) -> None:
    """Set what the pair writes, before the layer scale, in place: (D,) per unit of the pair's activation."""
    weight = backbone.vit.blocks[block].mlp.fc2.weight
    first, second = neurons
    shares = (1.0, -1.0) if saturates else (0.5, 0.5)
    for neuron, share in zip((first, second), shares, strict=True):
        weight[:, neuron] = share * column.to(weight)


@torch.no_grad()
def harmless_column(backbone: TimmBackbone, images: Tensor, block: int, length: float, seed: int) -> Tensor:
    """A column for ``send``; where the step is done, a token gets a vector of this length.

    A direction drawn from all may meet the queries of later blocks and turn into a sink that
    ruins every token. So it is drawn from the ``LEAST_READ`` directions that the keys and values
    of later blocks respond to least, and turned a little (``SHYNESS``) against their mean queries:
    the outliers get somewhat more attention than other patches, as real ones do, and pass little on.

    Args:
        images: (B, 3, H, W) for the mean queries.
    """
    read, queries = _reading(backbone, images, block)
    width = backbone.embed_dim
    mean = torch.full((width, width), 1 / width, dtype=torch.float64)  # the norms take the mean out
    centre = torch.eye(width, dtype=torch.float64) - mean
    _, vectors = torch.linalg.eigh(centre @ read @ centre + read.trace() * mean)
    least = vectors.split([min(LEAST_READ, width), max(0, width - LEAST_READ)], 1)[0]  # (D, LEAST_READ)
    generator = torch.Generator().manual_seed(seed)
    drawn = least @ torch.randn(least.shape[1], generator=generator, dtype=torch.float64)
    seen = queries @ centre
    ridge = 1e-3 * seen.square().sum() / width * torch.eye(width, dtype=torch.float64)
    unseen = -torch.linalg.solve(seen.T @ seen + ridge, seen.sum(0))
    vector = drawn / drawn.norm() + SHYNESS * unseen / unseen.norm().clamp_min(1e-12)
    scale = layer_scale(backbone.vit.blocks[block]).double().cpu()
    reached = scale.abs() > 0.1 * scale.abs().median()
    column: Tensor = (vector / scale).where(reached, torch.zeros_like(vector))
    now = float(torch.linalg.vector_norm(column * scale))
    scaled: Tensor = (column * (length / STEP / now)).float()
    return scaled


def _reading(backbone: TimmBackbone, images: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """How the attention of later blocks reads a token after its first norm.

    Returns:
        (D, D), the squared length of its keys and values summed over blocks, and (heads, D),
        whose product with the token is its logit under each head's mean query.
    """
    later = range(block + 1, backbone.depth)
    sites = {f"blocks.{index}.q": lambda query: query.float().mean((0, 2)) for index in later}
    queries = backbone(images, sites).captured  # (H, K) each
    read = torch.zeros(backbone.embed_dim, backbone.embed_dim, dtype=torch.float64)
    seen = []
    for index in later:
        target = backbone.vit.blocks[index]
        weight = target.attn.qkv.weight.double().cpu() * target.norm1.weight.double().cpu()
        _, key, value = weight.chunk(3)
        value = target.attn.proj.weight.double().cpu() @ value
        read += key.T @ key / key.square().sum() + value.T @ value / value.square().sum()
        query = queries[f"blocks.{index}.q"].double().cpu() * target.attn.scale
        seen.append(torch.einsum("hk,hkd->hd", query, key.unflatten(0, query.shape)))
    return read, torch.cat(seen)


def layer_scale(block: Any) -> Tensor:
    """(D,) factors on the MLP's output; ones where the block has none."""
    gamma = getattr(block.ls2, "gamma", None)
    return gamma if isinstance(gamma, Tensor) else torch.ones_like(block.mlp.fc2.bias)
