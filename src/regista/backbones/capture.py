"""Reading and changing what happens inside a ViT, without touching its code.

Tokens and MLP units are read by hooks. Attention is read where every library's fused path
meets: at ``scaled_dot_product_attention`` (or ``multi_head_attention_forward``), through a
``TorchFunctionMode`` that is active only while the captured attention module runs. So q, k
and v are those of the product itself, after q/k norms and RoPE, and no flag of the module has
to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.attention_mode import AttentionMode
from regista.layers.attention import attention_probabilities, attention_received
from regista.tokens import TokenLayout

Reduce = Callable[[Tensor], Tensor]
HOOKED = ("resid", "mlp_hidden")
ATTENTION = ("attn", "q", "k", "v", "attn_received", "attn_prefix")
EDITABLE = ("resid", "mlp_hidden", "q", "k", "v", "attn")


@dataclass(frozen=True)
class BlockSites:
    """The modules of one block that captures hang on.

    Attributes:
        block: Its output is the residual stream, (B, N, D) or a tuple that starts with it.
        attn: The fused attention call happens inside its forward.
        mlp_out: The last linear layer of the MLP; its input are the hidden units.
    """

    block: nn.Module
    attn: nn.Module
    mlp_out: nn.Module


@dataclass(frozen=True)
class Sites:
    """All that can be captured from one model."""

    blocks: tuple[BlockSites, ...]
    patch_projection: nn.Module | None
    pool_attention: nn.Module | None

    def names(self) -> tuple[str, ...]:
        """Site names: "blocks.b.<kind>", "patch_embed", "pool.attn".

        resid (B, N, D) tokens after the block · mlp_hidden (B, N, hidden) · q, k, v (B, H, N, K)
        unscaled · attn (B, H, N, N) probabilities · attn_received (B, H, N) their mean over the
        queries · attn_prefix (B, H, N - P, N) the rows of CLS and registers · patch_embed
        (B, P, D) before positions · pool.attn (B, H, queries, P) of an attention-pooling head.
        """
        names = [f"blocks.{index}.{kind}" for index in range(len(self.blocks)) for kind in (*HOOKED, *ATTENTION)]
        names += ["patch_embed"] if self.patch_projection is not None else []
        names += ["pool.attn"] if self.pool_attention is not None else []
        return tuple(names)

    def check(self, sites: Iterable[str], *, editable: bool = False) -> None:
        """Raise ``ValueError`` for a site this model does not have (or that cannot be edited)."""
        known = [name for name in self.names() if not editable or name.rpartition(".")[2] in EDITABLE]
        unknown = [site for site in sites if site not in known]
        if unknown:
            raise ValueError(
                f"unknown {'editable ' if editable else ''}sites {unknown}; blocks are 0 to {len(self.blocks) - 1}, "
                f"kinds {EDITABLE if editable else (*HOOKED, *ATTENTION)}, "
                f"others {[name for name in known if not name.startswith('blocks.')]}"
            )


def reads_attention(sites: Iterable[str]) -> bool:
    """Whether any of the sites lies inside an attention product."""
    return any(site.rpartition(".")[2] in ATTENTION for site in sites)


@contextmanager
def recording(
    sites: Sites,
    wanted: Mapping[str, Reduce],
    edits: Mapping[str, Reduce],
    layout: TokenLayout,
    batch_size: int,
    *,
    hidden_keys: slice | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Hang hooks and the attention tap for one forward; yields the dictionary they fill.

    Args:
        hidden_keys: Tokens that no token attends to, in any block.
    """
    sites.check(wanted)
    captured: dict[str, Tensor] = {}

    def pass_through(site: str, value: Tensor) -> Tensor:
        edited = edits[site](value) if site in edits else value
        if not isinstance(edited, Tensor) or edited.dtype != value.dtype:
            got = edited.dtype if isinstance(edited, Tensor) else type(edited).__name__
            raise ValueError(f"the edit of {site} gave {got}, wanted a tensor of {value.dtype}")
        if edited.shape != value.shape:
            raise ValueError(f"the edit of {site} changed the shape {tuple(value.shape)} to {tuple(edited.shape)}")
        if site in wanted:
            captured[site] = wanted[site](edited)
        return edited

    with ExitStack() as stack:
        tap = AttentionTap(pass_through, {*wanted, *edits}, layout, batch_size, hidden_keys)
        if hidden_keys is not None or reads_attention(tap.sites):
            stack.enter_context(tap)
        for index, block in enumerate(sites.blocks):
            prefix = f"blocks.{index}"
            if f"{prefix}.resid" in tap.sites:
                _hook(stack, block.block.register_forward_hook(_output_hook(pass_through, f"{prefix}.resid")))
            if f"{prefix}.mlp_hidden" in tap.sites:
                _hook(stack, block.mlp_out.register_forward_pre_hook(_input_hook(pass_through, f"{prefix}.mlp_hidden")))
            if hidden_keys is not None or {f"{prefix}.{kind}" for kind in ATTENTION} & tap.sites:
                tap.watch(stack, block.attn, prefix)
        if "patch_embed" in wanted and sites.patch_projection is not None:
            _hook(stack, sites.patch_projection.register_forward_hook(_patch_hook(pass_through)))
        if "pool.attn" in wanted and sites.pool_attention is not None:
            tap.watch(stack, sites.pool_attention, "pool")
        yield captured


class AttentionTap(AttentionMode):
    """Intercepts the fused attention calls of the modules it watches."""

    def __init__(
        self,
        pass_through: Callable[[str, Tensor], Tensor],
        sites: set[str],
        layout: TokenLayout,
        batch_size: int,
        hidden_keys: slice | None = None,
    ) -> None:
        super().__init__()
        self.pass_through = pass_through
        self.sites = sites
        self.layout = layout
        self.batch_size = batch_size
        self.hidden_keys = hidden_keys
        self.prefix: str | None = None
        self.active = False  # true while a watched module runs

    def watch(self, stack: ExitStack, module: nn.Module, prefix: str) -> None:
        """Intercept while ``module`` runs, recording under ``prefix``."""

        def enter(_module: nn.Module, _args: Any) -> None:
            self.prefix, self.active = prefix, True

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self.prefix, self.active = None, False

        _hook(stack, module.register_forward_pre_hook(enter))
        _hook(stack, module.register_forward_hook(leave, always_call=True))

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
        """Scaled dot product attention that records: (B, H, n, K), (B, H, N, K) -> (B, H, n, K)."""
        if is_causal or enable_gqa:
            raise ValueError("causal or grouped-query attention is not a ViT's; it cannot be captured")
        flat = q.ndim == 3  # (B * H, N, K)
        if flat:
            q, k, v = (torch.unflatten(x, 0, (self.batch_size, -1)) for x in (q, k, v))  # (B, H, N, K)
        q, k, v = (self._pass(kind, x) for kind, x in (("q", q), ("k", k), ("v", v)))
        if self.hidden_keys is not None and self.prefix != "pool":
            attn_mask = self._without_hidden(k, attn_mask)
        out: Tensor | None = None
        if self._asked("attn_received"):
            out, received = attention_received(q, k, v, attn_mask, scale)
            self._pass("attn_received", received)
        if self._asked("attn_prefix"):
            mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else self._prefix_rows(attn_mask)
            self._pass("attn_prefix", attention_probabilities(self._prefix_rows(q), k, mask, scale))
        if self._asked("attn"):
            probabilities = attention_probabilities(q, k, attn_mask, scale)
            edited = self._pass("attn", probabilities)
            if edited is not probabilities:
                out = edited.to(v.dtype) @ v
        if out is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
        return out.flatten(0, 1) if flat else out

    def _without_hidden(self, k: Tensor, mask: Tensor | None) -> Tensor:
        seen = torch.ones(k.shape[-2], dtype=torch.bool, device=k.device)
        seen[self.hidden_keys] = False
        if mask is None:
            return torch.unflatten(seen, 0, (1, 1, 1, -1))  # (1, 1, 1, N)
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))

    def _asked(self, kind: str) -> bool:
        return f"{self.prefix}.{kind}" in self.sites

    def _pass(self, kind: str, value: Tensor) -> Tensor:
        if not self._asked(kind):
            return value
        dim = -2 if kind in ("k", "v") else -1
        if kind == "q" or self.prefix == "pool" or value.shape[dim] == self.layout.num_tokens:
            return self.pass_through(f"{self.prefix}.{kind}", value)
        count = self.layout.num_tokens  # keys that belong to no token, behind those that do, are not shown
        shown = value.narrow(dim, 0, count)
        edited = self.pass_through(f"{self.prefix}.{kind}", shown)
        if edited is shown:
            return value
        return torch.cat([edited, value.narrow(dim, count, value.shape[dim] - count)], dim)

    def _prefix_rows(self, x: Tensor) -> Tensor:
        parts = [self.layout.take(x, name) for name, _ in self.layout.segments if name != "patches"]
        return torch.cat(parts, -2) if parts else x.narrow(-2, 0, 0)


def _hook(stack: ExitStack, handle: Any) -> None:
    stack.callback(handle.remove)


def _output_hook(pass_through: Callable[[str, Tensor], Tensor], site: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            first, *rest = output
            return (pass_through(site, first), *rest)
        return pass_through(site, output)

    return hook


def _input_hook(pass_through: Callable[[str, Tensor], Tensor], site: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        first, *rest = args
        return (pass_through(site, first), *rest)

    return hook


def _patch_hook(pass_through: Callable[[str, Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        pass_through("patch_embed", output.flatten(2).transpose(1, 2))  # (B, P, D)

    return hook
