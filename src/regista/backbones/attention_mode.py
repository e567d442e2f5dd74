"""Where the attention of every library meets: at two functions of torch that a mode can intercept."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regista.layers.attention import attention_probabilities


class AttentionMode(TorchFunctionMode):
    """Routes fused attention calls, while it is active, through ``attend``.

    ``torch.compile`` traces it inside a model; for that ``active`` must be a plain attribute.
    """

    active: bool = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Route attention calls through ``attend``; leave all others alone."""
        kwargs = kwargs or {}
        if self.active:
            if func is F.scaled_dot_product_attention:
                return self.attend(*args, **kwargs)
            if func is F.multi_head_attention_forward:
                return self.multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    @abstractmethod
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
        """In place of ``scaled_dot_product_attention``."""

    def multi_head(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``nn.MultiheadAttention``'s function, (N, B, D) in and out, with ``attend`` inside."""
        names: tuple[str, ...] = ("embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias")
        names += ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        odd = ("bias_k", "bias_v", "key_padding_mask", "static_k", "static_v")
        if any(given.get(name) is not None for name in odd) or given.get("add_zero_attn") or query.ndim != 3:
            raise ValueError("this nn.MultiheadAttention cannot be captured (padding, extra biases or no batch)")
        if given.get("use_separate_proj_weight"):  # keys of another width than the queries
            weights = [given[f"{kind}_proj_weight"] for kind in "qkv"]
        else:
            weights = given["in_proj_weight"].chunk(3)
        biases = given["in_proj_bias"].chunk(3) if given["in_proj_bias"] is not None else (None, None, None)
        heads = []
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            projected = torch.unflatten(F.linear(x, weight, bias), -1, (given["num_heads"], -1))  # (N, B, H, K)
            heads.append(projected.permute(1, 2, 0, 3))  # (B, H, N, K)
        mask = given.get("attn_mask")
        if mask is not None and mask.ndim == 3:
            mask = torch.unflatten(mask, 0, (-1, given["num_heads"]))  # (B, H, N, N)
        q, k, v = heads
        dropout = float(given["dropout_p"]) if given.get("training", True) else 0.0
        out = self.attend(q, k, v, mask, dropout)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (N, B, D)
        out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
        if not given.get("need_weights", True):
            return out, None
        weights_out = attention_probabilities(q, k, mask)
        return out, weights_out.mean(1) if given.get("average_attn_weights", True) else weights_out
