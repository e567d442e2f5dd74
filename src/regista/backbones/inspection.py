"""What a model is made of, as far as tokens and registers are concerned."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.positions import PositionResize
from regista.tokens import square_grid

_ACTIVATION = re.compile(r"(QuickGELU|GELU|SiLU|Swish|ReLU|Mish|Tanh|Sigmoid)", re.IGNORECASE)
_ROPE = re.compile(r"rope|rotary|rotembed", re.IGNORECASE)


def inspect_backbone(backbone: Backbone) -> dict[str, Any]:
    """Facts read from the live module, never from its name; plain values that JSON can hold.

    Raises:
        ValueError: if the patch size does not divide ``backbone.image_size``.
    """
    layout = backbone.layout()
    planted = backbone.planted
    kind, hidden = mlp_facts(backbone)
    parameters = list(backbone.module.parameters())
    return {
        "model": backbone.name,
        "library": backbone.library,
        "class": type(backbone.module).__name__,
        "tokens": str(layout),
        "order": [name for name, _ in layout.segments],
        "num_tokens": layout.num_tokens,
        "num_register_tokens": backbone.num_register_tokens,
        "image_size": list(backbone.image_size),
        "grid_size": list(layout.grid_size),
        "patch_size": backbone.patch_size,
        "depth": backbone.depth,
        "embed_dim": backbone.embed_dim,
        "num_heads": backbone.num_heads,
        "mlp": kind,
        "mlp_hidden": hidden,
        "attention_backend": backbone.attention_backend(),
        "positions": position_facts(backbone),
        "pooling": _pooling(backbone),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": str(backbone.device),
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "planted": None
        if planted is None
        else {"kind": planted.kind, "block": planted.block, "neurons": list(planted.neurons)},
        "notes": list(backbone.notes),
    }


def mlp_facts(backbone: Backbone) -> tuple[str, int]:
    """("GELU" | "QuickGELU" | "SwiGLU" ..., hidden width) of the first block's MLP.

    A gated MLP has two layers of the hidden width before its product, or one of twice that.
    """
    first, *_ = backbone.block_sites()
    attention = set() if first.attn is first.block else {id(part) for part in first.attn.modules()}
    parts = [part for part in first.block.modules() if id(part) not in attention and part is not first.mlp_out]
    weight = first.mlp_out.weight
    assert isinstance(weight, Tensor)
    hidden = int(weight.shape[1])
    widths = [part.out_features for part in parts if isinstance(part, nn.Linear)]
    gated = 2 * hidden in widths or widths.count(hidden) > 1
    names = [found.group(1) for part in parts if (found := _ACTIVATION.search(type(part).__name__))]
    named_swiglu = any("swiglu" in type(part).__name__.lower() for part in parts)
    activation = next(iter(names), "SiLU" if named_swiglu else "GELU" if not gated else "SiLU")
    if gated:
        return {"SiLU": "SwiGLU", "GELU": "GeGLU"}.get(activation, f"gated {activation}"), hidden
    return activation, hidden


def position_facts(backbone: Backbone) -> str:
    """Where positions come from: a learned table, its grid and how it is resized, or RoPE."""
    said = []
    table = _position_table(backbone)
    if table is not None:
        rows = table.numel() // backbone.embed_dim
        said.append(f"learned table of {_table_grid(backbone, rows)}, resized {_resizing(backbone)}")
    if any(_ROPE.search(type(part).__name__) for part in backbone.module.modules()):
        said.append("RoPE on the patches")
    return " and ".join(said) or "none"


def _position_table(backbone: Backbone) -> Tensor | None:
    module: Any = backbone.module
    for holder, name in ((module, "pos_embed"), (module, "positional_embedding"), (module, "encoder")):
        found = getattr(holder, name, None)
        found = getattr(found, "pos_embedding", None) if isinstance(found, nn.Module) else found
        if isinstance(found, Tensor):
            return found
    own = getattr(backbone, "position_table", None)
    table: Tensor | None = own() if own is not None else None
    return table


def _table_grid(backbone: Backbone, rows: int) -> str:
    grid = getattr(getattr(backbone.module, "patch_embed", None), "grid_size", None)
    if grid is None:
        try:
            grid = square_grid(rows - backbone.num_cls_tokens)
        except ValueError:
            return f"{rows} rows"
    extra = rows - grid[0] * grid[1]
    return f"{grid[0]}x{grid[1]} cells" + (f" and {extra} more rows" if extra else "")


def _resizing(backbone: Backbone) -> str:
    how: PositionResize | None = getattr(backbone, "positions", None)
    if how is None:
        return "by the module itself"
    words = [how.mode, "antialiased" if how.antialias else "not antialiased"]
    words += ["corners aligned"] if how.align_corners else []
    words += [f"offset {how.offset:g}"] if how.offset else []
    return ", ".join(words)


def _pooling(backbone: Backbone) -> str:
    """How the model makes one vector of its tokens."""
    if backbone.pool_attention() is not None:
        return "attention"
    own = getattr(backbone.module, "global_pool", None) or getattr(backbone.module, "pool_type", None)
    words = {"token": "CLS", "tok": "CLS", "avg": "mean of the patches", "max": "maximum of the patches"}
    if isinstance(own, str):
        return words.get(own, own)
    return "CLS" if backbone.num_cls_tokens else "mean of the patches"
