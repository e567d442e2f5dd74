"""The defect directions of a whole model, from its weights alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone, evaluation_mode
from regista.backbones.block_weights import BlockParts, block_parts
from regista.layers.singular_defect import LinearBlock, defect_directions


@torch.no_grad()
def model_directions(
    backbone: Backbone, *, num_samples: int = 100_000, seed: int = 0, inputs: Literal["unit", "normed"] = "unit"
) -> Tensor:
    """Defect direction after each block (2407.16826, section 3): (depth, D) float32, unit norm.

    Args:
        num_samples, seed, inputs: See ``regista.layers.singular_defect.defect_directions``.

    Raises:
        ValueError: for blocks that are not LayerNorm, attention, LayerNorm and MLP, for MLPs that
            something hangs on, and for weights that are NaN or infinite.
    """
    blocks = [linear_block(block_parts(backbone, block), f"block {block}") for block in range(backbone.depth)]
    with evaluation_mode(backbone.module):
        return defect_directions(blocks, num_samples=num_samples, seed=seed, inputs=inputs)


def linear_block(parts: BlockParts, where: str) -> LinearBlock:
    """What the linear map of a block needs; a norm inside the attention is treated like the others."""
    for norm in (parts.norm1, parts.norm2, parts.inner_norm):
        if norm is not None and not isinstance(norm, nn.LayerNorm):
            raise ValueError(f"{where} has a {type(norm).__name__}; singular defects are worked out for LayerNorm")
    hooked = [part for part in parts.mlp.modules() if part._forward_hooks or part._forward_pre_hooks]
    if hooked:
        raise ValueError(
            f"{where}: something hangs on its MLP, so its weights are not all it does; take the model as it was "
            "before it was fixed"
        )
    output: Tensor = parts.out_weight
    if parts.inner_norm is not None:
        weight = _of(parts.inner_norm, "weight")
        output = output if weight is None else output * weight
        output = output - output.mean(-1, keepdim=True)
    return LinearBlock(
        value_weight=parts.v_weight,
        output_weight=output,
        mlp=parts.mlp,
        norm1_weight=_of(parts.norm1, "weight"),
        norm2_weight=_of(parts.norm2, "weight"),
        norm2_bias=_of(parts.norm2, "bias"),
        gamma1=parts.gamma1,
        gamma2=parts.gamma2,
    )


def _of(norm: nn.Module, name: str) -> Tensor | None:
    value: Tensor | None = getattr(norm, name, None)
    return value
