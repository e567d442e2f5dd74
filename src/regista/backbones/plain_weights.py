"""Whether a timm ViT is one of the plain kind that other libraries have too, and its numbers.

Plain: patches, CLS or registers before them, learned positions or DINOv3's RoPE, pre-norm blocks of
one softmax attention and one MLP (exact GELU, or SwiGLU), layer scale or none, one last norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from regista.backbones.base import Backbone

ADVICE = "it needs Regista: save_pretrained (--format regista) and regista.load keep it as it is"


@dataclass(frozen=True)
class PlainVit:
    """The numbers of a plain ViT.

    Attributes:
        eps: Of every layer norm.
        hidden: Units before the last layer of an MLP.
        gated: SwiGLU instead of GELU.
        qkv_bias: Whether queries, keys and values have one (in timm's ``Eva``: queries and values).
        grid_size: (rows, cols) of the position table; of the native size for RoPE.
        rope: The temperature of DINOv3's RoPE; None with a learned table.
    """

    eps: float
    hidden: int
    gated: bool
    qkv_bias: bool
    grid_size: tuple[int, int]
    rope: float | None


def check_plain_weights(backbone: Backbone, target: str) -> None:
    """Raise ``ValueError`` if the backbone is more than its weights: something Regista does at run time.

    Args:
        target: What was to be made of it, for the message.
    """
    reason = getattr(backbone, "needs_regista", None)
    if reason:
        raise ValueError(f"{backbone.name} cannot become {target}: {reason}; {ADVICE}")
    if backbone._edits:
        raise ValueError(
            f"{backbone.name} cannot become {target} while edits of {sorted(backbone._edits)} are open; "
            "leave the editing context first"
        )


def plain_vit(backbone: Backbone) -> PlainVit:
    """The numbers of a timm backbone.

    Raises:
        ValueError: if it is not plain, naming the first thing in the way.
    """
    vit: Any = backbone.module
    is_eva = type(vit) is Eva
    problem = _odd_model(vit) or next(
        (f"block {index} {odd}" for index, block in enumerate(vit.blocks) if (odd := _odd_block(block, is_eva))), None
    )
    if not problem:
        eps = {float(norm.eps) for norm in _norms(vit)}
        mlps = {(int(block.mlp.fc2.in_features), not isinstance(block.mlp, Mlp)) for block in vit.blocks}
        if len(eps) == 1 and len(mlps) == 1:
            [(hidden, gated)] = mlps
            return _facts(vit, is_eva, eps.pop(), hidden, gated)
        problem = f"has layer norms of eps {sorted(eps)} and MLPs of {sorted(mlps)} units, wanted one of each"
    raise ValueError(f"{backbone.name} {problem}, which cannot be said in another library; {ADVICE}")


def normed_tokens(backbone: Backbone, tokens: Tensor) -> Tensor:
    """Tokens after the last norm there is: (B, N, D) -> (B, N, D).

    timm's patch-average networks norm only the mean of the patches (``fc_norm``), so their own
    tokens come without; models of other libraries norm every token.
    """
    norm: Any = getattr(backbone.module, "fc_norm", None)
    own: Any = getattr(backbone.module, "norm", None)
    if backbone.library != "timm" or not isinstance(norm, nn.LayerNorm) or not isinstance(own, nn.Identity):
        return tokens
    with torch.no_grad():
        normed: Tensor = norm(tokens)
    return normed


# Inside ---------------------------------------------------------------------------------------


def _facts(vit: Any, is_eva: bool, eps: float, hidden: int, gated: bool) -> PlainVit:
    attention = next(iter(vit.blocks)).attn
    bias = attention.q_bias if is_eva else attention.qkv.bias
    return PlainVit(
        eps=eps,
        hidden=hidden,
        gated=gated,
        qkv_bias=bias is not None,
        grid_size=(int(vit.patch_embed.grid_size[0]), int(vit.patch_embed.grid_size[1])),
        rope=float(vit.rope.temperature) if is_eva else None,
    )


def _odd_model(vit: Any) -> str | None:
    if type(vit) not in (VisionTransformer, Eva):
        return f"is a {type(vit).__name__}"
    projection = vit.patch_embed.proj
    if not isinstance(projection, nn.Conv2d) or not _is_absent(vit.patch_embed.norm):
        return "embeds patches by more than one convolution"
    if projection.in_channels != 3:
        return f"takes {projection.in_channels} channels"
    if not _is_absent(vit.norm_pre):
        return "norms the tokens before the first block (pre_norm)"
    last = [norm for norm in (vit.norm, vit.fc_norm) if not _is_absent(norm)]
    if not last or not isinstance(last[0], nn.LayerNorm):
        return "has no layer norm behind the last block"
    return _odd_positions(vit)


def _odd_positions(vit: Any) -> str | None:
    if isinstance(vit, VisionTransformer):
        return None if vit.pos_embed is not None else "has no position table"
    rope = vit.rope
    usual = isinstance(rope, RotaryEmbeddingDinoV3) and (
        rope.temperature is not None
        and rope.rotate_half
        and rope.normalize_coords == "separate"
        and rope.grid_indexing == "ij"
        and not rope.grid_offset
    )
    if vit.pos_embed is not None or not usual or getattr(vit, "rope_mixed", False):
        return "does not place its patches by DINOv3's RoPE alone"
    return None


def _odd_block(block: Any, is_eva: bool) -> str | None:
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    if type(block) is not (EvaBlock if is_eva else Block):
        return f"is a {type(block).__name__}"
    if type(attention) is not (EvaAttention if is_eva else Attention) or attention.qkv is None:
        return f"attends by a {type(attention).__name__} of another kind"
    if not _is_absent(attention.q_norm) or not _is_absent(attention.k_norm):
        return "norms queries and keys (qk_norm)"
    if not _is_absent(attention.norm) or getattr(attention, "gate", None) is not None:
        return "norms or gates what attention gives"
    if is_eva and not attention.rotate_half:
        return "rotates its heads in another way than DINOv3"
    if not isinstance(block.norm1, nn.LayerNorm) or not isinstance(block.norm2, nn.LayerNorm):
        return f"norms by a {type(block.norm1).__name__}"
    return _odd_mlp(mlp)


def _odd_mlp(mlp: Any) -> str | None:
    gated = isinstance(mlp, SwiGLU) or (isinstance(mlp, GluMlp) and not mlp.gate_last)
    if not (type(mlp) is Mlp or gated) or not _is_absent(mlp.norm):
        return f"has an MLP of another kind ({type(mlp).__name__})"
    exact = isinstance(mlp.act, nn.SiLU) if gated else isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
    return None if exact else f"has {mlp.act} in its MLP, wanted {'SiLU' if gated else 'exact GELU'}"


def _norms(vit: Any) -> list[Any]:
    """All that tokens pass through."""
    found = [norm for norm in (vit.norm, vit.fc_norm) if isinstance(norm, nn.LayerNorm)]
    if len(found) == 2:
        found = [vit.norm]  # a second one norms the pooled vector, behind the tokens
    for block in vit.blocks:
        found += [norm for norm in (getattr(block, "norm1", None), getattr(block, "norm2", None)) if norm is not None]
    return [norm for norm in found if hasattr(norm, "eps")]


def _is_absent(module: Any) -> bool:
    return module is None or isinstance(module, nn.Identity)
