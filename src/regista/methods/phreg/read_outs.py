"""What of teacher and student is compared: normed patches, or CLIP's projected patches of another last block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.block_weights import block_parts
from regista.layers.last_block import KEEPS_RESIDUAL, LastBlock, last_block_attention

ReadOut = Callable[[Backbone, Tensor], Tensor]


def read_outs(backbone: Backbone, name: str) -> tuple[ReadOut | None, ReadOut | None]:
    """(of the teacher, of the student); None is the patch tokens after the final norm.

    "clip-released": the released CLIP run of PH-Reg (2505.21501) has NACLIP's last block in the teacher
    and MaskCLIP's in the student, both projected into the space of the text.

    Raises:
        ValueError: for "clip-released" with a model that is no CLIP.
    """
    if name == "normed":
        return None, None
    if not is_clip(backbone):
        raise ValueError(
            f"read_out={name!r} is for CLIP models of open_clip and transformers (with their projection); "
            f"{backbone.name} is a {type(backbone.module).__name__}; take read_out='normed'"
        )
    return partial(projected_patches, variant="naclip"), partial(projected_patches, variant="maskclip")


def is_clip(backbone: Backbone) -> bool:
    """Whether its patches can be projected into a space shared with text."""
    try:
        backbone.to_joint_space(torch.zeros(1, 1, backbone.embed_dim, device=backbone.device, dtype=backbone.dtype))
    except ValueError:
        return False
    return True


def projected_patches(backbone: Backbone, images: Tensor, *, variant: LastBlock) -> Tensor:
    """Patches in the space of the text, with another attention in the last block: (B, 3, H, W) -> (B, P, E).

    Not normalised to unit length.

    Args:
        variant: See ``regista.layers.last_block``. Without residual connection and MLP for "maskclip",
            "naclip" and "clearclip".
    """
    last = backbone.depth - 1
    layout = backbone.layout((images.shape[-2], images.shape[-1]))
    site = f"blocks.{last - 1}.resid"
    tokens = backbone(images, (site,)).captured[site]  # (B, N, D)
    parts = block_parts(backbone, last)
    x = parts.norm1(tokens)
    weights = ((parts.q_weight, parts.q_bias), (parts.k_weight, parts.k_bias), (parts.v_weight, parts.v_bias))
    q, k, v = (
        torch.unflatten(torch.nn.functional.linear(x, weight, bias), -1, (parts.num_heads, -1)).transpose(1, 2)
        for weight, bias in weights
    )  # (B, H, N, K)
    gathered = last_block_attention(q, k, v, layout, variant).transpose(1, 2).flatten(2)  # (B, N, H * K)
    out = torch.nn.functional.linear(gathered, parts.out_weight, parts.out_bias)
    if KEEPS_RESIDUAL[variant]:
        out = tokens + (out if parts.gamma1 is None else parts.gamma1 * out)
        more = parts.mlp(parts.norm2(out))
        out = out + (more if parts.gamma2 is None else parts.gamma2 * more)
    return layout.take(backbone.to_joint_space(out), "patches")
