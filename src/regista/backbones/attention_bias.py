"""A constant key and value in every attention: test-time registers without a token (2506.08010)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.additions import Addition
from regista.backbones.attention_mode import AttentionMode

if TYPE_CHECKING:
    from regista.backbones.base import Backbone


class AttentionBias(Addition):
    """Every query of every block attends to one more key, which no token has.

    Args:
        keys, values: (blocks, H, K), as used in the product: after key norms, without RoPE.
    """

    kind = "attention-bias"
    reason = "its attention has a constant key and value that act through a hook"
    needs_fused_attention = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys.detach().clone())
        self.register_buffer("values", values.detach().clone())

    def hang(self, backbone: Backbone) -> None:
        """Around every attention module."""
        for block, sites in enumerate(backbone.block_sites()):
            mode = _ExtraKey(self, block, backbone.num_heads)
            sites.attn.register_forward_pre_hook(partial(_enter, mode))
            sites.attn.register_forward_hook(partial(_leave, mode), always_call=True)

    def to_record(self) -> dict[str, Any]:
        """The shape of the tensors."""
        return {"kind": self.kind, "shape": list(self.get_buffer("keys").shape)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> AttentionBias:
        """Zeros, to be filled with the weights."""
        zeros = torch.zeros(*(int(side) for side in record["shape"]), dtype=backbone.dtype)
        return cls(zeros, zeros)


class _ExtraKey(AttentionMode):
    def __init__(self, addition: AttentionBias, block: int, num_heads: int) -> None:
        super().__init__()
        self.addition, self.block, self.num_heads = addition, block, num_heads
        self.calls = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """With one key more behind all others: (B, H, n, K), (B, H, N, K) -> (B, H, n, K)."""
        if is_causal or enable_gqa:
            raise ValueError("causal or grouped-query attention is not a ViT's; it cannot have a constant key")
        self.calls += 1
        flat = q.ndim == 3  # (B * H, N, K)
        if flat:
            q, k, v = (torch.unflatten(x, 0, (-1, self.num_heads)) for x in (q, k, v))
        extra = [self.addition.get_buffer(name).unbind(0)[self.block] for name in ("keys", "values")]  # (H, K)
        keys, values = (
            torch.cat([x, more.to(x.dtype).unsqueeze(-2).expand(len(x), -1, -1, -1)], -2)
            for x, more in zip((k, v), extra, strict=True)
        )
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, 1), value=1 if attn_mask.dtype == torch.bool else 0)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask, dropout_p, scale=scale)
        return out.flatten(0, 1) if flat else out


def _enter(mode: Any, _module: nn.Module, _args: Any) -> None:
    mode.calls = 0
    mode.__enter__()


def _leave(mode: Any, module: nn.Module, _args: Any, output: Any) -> None:
    mode.__exit__(None, None, None)
    if not mode.calls and output is not None:  # None: it raised an exception, which is on its way
        raise ValueError(
            f"the attention of a {type(module).__name__} did not go through scaled_dot_product_attention, so the "
            "constant key was not seen; switch the module to fused attention"
        )
