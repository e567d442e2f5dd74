"""The weights of one block under the same names, whatever library it is from.

timm and the hub fuse query, key and value in one layer, transformers keeps three, open_clip and
torchvision use torch's ``MultiheadAttention``. What reads or rewrites a block's weights starts here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

_NORM1 = ("norm1", "layernorm_before", "layer_norm1", "ln_1")
_NORM2 = ("norm2", "layernorm_after", "layer_norm2", "ln_2")
_GAMMA1 = ("ls1.gamma", "gamma_1", "layer_scale1.lambda1", "ls_1.gamma")
_GAMMA2 = ("ls2.gamma", "gamma_2", "layer_scale2.lambda1", "ls_2.gamma")
_OUT = ("proj", "o_proj", "out_proj")


@dataclass(frozen=True)
class BlockParts:
    """A pre-norm block, x + gamma1 * attention(norm1(x)), then x + gamma2 * mlp(norm2(x)).

    The tensors are the module's own or views of them. D is the width, V = heads * head width.

    Attributes:
        num_heads: H.
        norm1, norm2: Of the attention's and the MLP's input.
        q_weight, k_weight, v_weight: (V, D), applied as ``x @ weight.T``.
        q_bias, k_bias, v_bias: (V,) or None.
        q_norm, k_norm: Norms of each head's queries and keys, or None.
        inner_norm: A norm of the joined heads before the projection, or None.
        out_weight: (D, V), the projection behind the attention.
        out_bias: (D,) or None.
        mlp: (..., D) -> (..., D), to before LayerScale.
        gamma1, gamma2: (D,) LayerScale, or None without.
    """

    num_heads: int
    norm1: nn.Module
    norm2: nn.Module
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    inner_norm: nn.Module | None
    out_weight: Tensor
    out_bias: Tensor | None
    mlp: nn.Module
    gamma1: Tensor | None
    gamma2: Tensor | None


def block_parts(backbone: Backbone, block: int) -> BlockParts:
    """The parts of block ``block``, counted from 0.

    Raises:
        ValueError: for a block the model does not have, and for blocks that are not made of
            these parts alone: attention and MLP side by side, grouped queries, a gate, scaled
            heads, or a norm behind the projection.
    """
    sites = backbone.block_sites()
    if not 0 <= block < len(sites):
        raise ValueError(f"{backbone.name} has blocks 0 to {len(sites) - 1}, got {block}")
    whole, attention = sites[block].block, sites[block].attn
    where = f"block {block} of {backbone.name}"
    _check_nothing_else(whole, attention, where)
    (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias) = _queries_keys_values(attention, where)
    if k_weight.shape != q_weight.shape:
        raise ValueError(f"{where} shares its keys among several heads (grouped queries), which is not supported")
    out = _required(attention, _OUT, where)
    return BlockParts(
        num_heads=backbone.num_heads,
        norm1=_required(whole, _NORM1, where),
        norm2=_required(whole, _NORM2, where),
        q_weight=q_weight,
        k_weight=k_weight,
        v_weight=v_weight,
        q_bias=q_bias,
        k_bias=k_bias,
        v_bias=v_bias,
        q_norm=_norm(attention, ("q_norm", "ln_q")),
        k_norm=_norm(attention, ("k_norm", "ln_k")),
        inner_norm=_norm(attention, ("norm", "ln_inner")),
        out_weight=out.weight,
        out_bias=out.bias,
        mlp=_required(whole, ("mlp",), where),
        gamma1=_first(whole, _GAMMA1),
        gamma2=_first(whole, _GAMMA2),
    )


def _queries_keys_values(attention: Any, where: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of q, k and v."""
    fused = _first(attention, ("in_proj_weight", "qkv.weight"))
    if fused is not None:
        bias = _first(attention, ("in_proj_bias", "qkv.bias"))
        separate: list[Tensor | None] = [getattr(attention, f"{kind}_bias", None) for kind in "qkv"]
        return list(fused.chunk(3)), separate if bias is None else list(bias.chunk(3))
    layers: list[Any] = [getattr(attention, f"{kind}_proj", None) for kind in "qkv"]
    if any(layer is None for layer in layers):
        raise ValueError(f"{where}: a {type(attention).__name__} has no known query, key and value layers")
    found: list[Any] = layers
    return [layer.weight for layer in found], [layer.bias for layer in found]


def _check_nothing_else(whole: Any, attention: Any, where: str) -> None:
    """Raise for parts that ``BlockParts`` has no name for."""
    found = {
        "attention and MLP side by side": whole is attention,
        "a gate": getattr(attention, "gate", None) is not None,
        "scaled heads": getattr(attention, "head_scale", None) is not None,
        "a norm behind the attention": _norm(whole, ("ln_attn",)) is not None,
    }
    named = [what for what, there in found.items() if there]
    if named:
        raise ValueError(f"{where} has {named[0]}; only blocks of norms, one attention and one MLP are supported")


def _norm(module: Any, names: tuple[str, ...]) -> nn.Module | None:
    found: nn.Module | None = _first(module, names)
    return None if isinstance(found, nn.Identity) else found


def _required(module: Any, names: tuple[str, ...], where: str) -> Any:
    found = _first(module, names)
    if found is None:
        raise ValueError(f"{where}: a {type(module).__name__} has none of {', '.join(names)}")
    return found


def _first(module: Any, paths: tuple[str, ...]) -> Any:
    """The first of the attributes that is there and not None."""
    for path in paths:
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
