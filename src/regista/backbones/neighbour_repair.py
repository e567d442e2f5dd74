"""Outlier patch tokens replaced by the tokens around them, at the output of one block."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from regista.backbones.additions import Addition
from regista.layers.neighbour_repair import KERNELS, Kernel, neighbour_average
from regista.layers.singular_defect import singular_defect_mask, smooth_repair
from regista.tokens import Segment, TokenLayout

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

_REMEMBERED = 16  # calls that were broken off before the block was reached


class NormRule(nn.Module):
    """Outliers are the tokens whose norm is above a cutoff; their unmasked neighbours' mean replaces them.

    Args:
        cutoff: A norm, taken in float32.
        kernel: Weights of the 8 neighbours, see ``regista.layers.neighbour_repair``.
    """

    kind = "norm"

    def __init__(self, cutoff: float, kernel: Kernel = "uniform") -> None:
        super().__init__()
        if not 0 < cutoff < float("inf"):
            raise ValueError(f"cutoff is a positive norm, got {cutoff}")
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {tuple(KERNELS)}, got {kernel!r}")
        self.cutoff, self.kernel = float(cutoff), kernel

    def mask(self, tokens_map: Tensor) -> Tensor:
        """(B, rows, cols, D) -> (B, rows, cols) bool."""
        norms: Tensor = torch.linalg.vector_norm(tokens_map.float(), dim=-1)
        return norms > self.cutoff

    def repaired(self, tokens_map: Tensor, mask: Tensor) -> Tensor:
        """(B, rows, cols, D) -> same shape; unmasked cells keep their bits."""
        return neighbour_average(tokens_map, mask, kernel=self.kernel)

    def to_record(self) -> dict[str, Any]:
        """Plain values."""
        return {"rule": self.kind, "cutoff": self.cutoff, "kernel": self.kernel}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> NormRule:
        """The same rule."""
        return cls(float(record["cutoff"]), record["kernel"])


class DirectionRule(nn.Module):
    """Outliers are the tokens along a defect direction; SINDER's smooth mean replaces them (2407.16826).

    Args:
        direction: (D,) of the block, see ``regista.layers.singular_defect``.
        num_deviations, ignore_border, min_tokens: Of ``singular_defect_mask``.
        temperature: Of ``smooth_repair``.
    """

    kind = "direction"

    def __init__(
        self,
        direction: Tensor,
        *,
        num_deviations: float = 4.0,
        ignore_border: bool = True,
        min_tokens: int = 3,
        temperature: float = 0.1,
    ) -> None:
        super().__init__()
        self.register_buffer("direction", direction.detach().clone())
        self.num_deviations, self.temperature = num_deviations, temperature
        self.ignore_border, self.min_tokens = ignore_border, min_tokens

    def mask(self, tokens_map: Tensor) -> Tensor:
        """(B, rows, cols, D) -> (B, rows, cols) bool."""
        return singular_defect_mask(
            tokens_map,
            self.get_buffer("direction").to(tokens_map.device),
            num_deviations=self.num_deviations,
            ignore_border=self.ignore_border,
            min_tokens=self.min_tokens,
        )

    def repaired(self, tokens_map: Tensor, mask: Tensor) -> Tensor:
        """(B, rows, cols, D) -> same shape; unmasked cells keep their bits."""
        direction = self.get_buffer("direction").to(tokens_map.device)
        return smooth_repair(tokens_map, mask, direction, temperature=self.temperature)

    def to_record(self) -> dict[str, Any]:
        """Plain values; the direction comes with the weights."""
        names = ("num_deviations", "ignore_border", "min_tokens", "temperature")
        return {"rule": self.kind, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> DirectionRule:
        """The same rule with a zero direction, to be filled with the weights."""
        return cls(
            torch.zeros(backbone.embed_dim, dtype=backbone.dtype),
            num_deviations=float(record["num_deviations"]),
            ignore_border=bool(record["ignore_border"]),
            min_tokens=int(record["min_tokens"]),
            temperature=float(record["temperature"]),
        )


Rule = NormRule | DirectionRule
RULES: dict[str, type[NormRule] | type[DirectionRule]] = {rule.kind: rule for rule in (NormRule, DirectionRule)}


class NeighbourRepair(Addition):
    """Replaces outlier patch tokens at the output of a block, each image by itself.

    The block sees tokens in a row, and the adapter may not be part of the call, so the grid comes
    from the patch convolution: its output is (B, D, rows, cols) in the same call. A call inside
    a call has its own grid. All other tokens, and images without outliers, keep their bits;
    images with NaN or infinite tokens are left to the checks of ``Backbone``.

    Args:
        block: Counted from 0.
        rule: Which tokens are outliers, and what replaces them.
    """

    kind = "neighbour-repair"
    reason = "its outlier tokens are replaced by a hook"

    def __init__(self, block: int, rule: Rule) -> None:
        super().__init__()
        self.block = block
        self.rule = rule
        self.num_prefix_tokens = 0
        self._pending: dict[int, list[tuple[int, int]]] = {}  # thread -> grids of calls that have not reached the block
        self._reached: tuple[int, int] | None = None  # grid of the call that did so last

    def hang(self, backbone: Backbone) -> None:
        """On the patch convolution and the block.

        Raises:
            ValueError: for a block the model does not have, a model without a patch convolution, or
                tokens behind the patches.
        """
        sites = backbone.block_sites()
        if not 0 <= self.block < len(sites):
            raise ValueError(f"{backbone.name} has blocks 0 to {len(sites) - 1}, got {self.block}")
        projection = backbone.patch_projection()
        if projection is None:
            raise ValueError(f"{backbone.name} has no patch convolution that would tell the grid of a call")
        *_, last = backbone.layout().segments
        if last.name != "patches":
            raise ValueError(f"the patches must stand at the end of the sequence, got {backbone.layout()}")
        self.num_prefix_tokens = backbone.layout().num_prefix_tokens
        projection.register_forward_hook(self.embed)
        sites[self.block].block.register_forward_hook(partial(_leave_block, self, sites[self.block].attn))

    def embed(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """Remember the grid of a call that begins."""
        rows, cols = output.shape[-2:]
        pending = self._pending.setdefault(threading.get_ident(), [])
        pending.append((int(rows), int(cols)))
        del pending[:-_REMEMBERED]

    def repair(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D), of the call that last embedded its patches."""
        if tokens.is_meta:
            return tokens
        layout = self._layout(tokens.shape[-2])
        parts = layout.split(tokens)
        tokens_map = torch.unflatten(parts["patches"], 1, layout.grid_size)  # (B, rows, cols, D)
        broken = ~tokens_map.isfinite().flatten(1).all(1)  # (B,)
        broken = torch.unflatten(broken, 0, (-1, 1, 1, 1))
        usable = tokens_map.masked_fill(broken, 0) if bool(broken.any()) else tokens_map
        mask = self.rule.mask(usable)
        if not bool(mask.any()):
            return tokens
        patches = torch.where(broken, tokens_map, self.rule.repaired(usable, mask))
        return layout.join({**parts, "patches": patches.flatten(1, 2)})

    def _layout(self, length: int) -> TokenLayout:
        pending = self._pending.get(threading.get_ident())
        grid = pending.pop() if pending else self._reached  # a block is computed again to save memory in training
        self._reached = grid
        before = length - (grid[0] * grid[1] if grid else length + 1)
        if grid is None or before < self.num_prefix_tokens:
            raise ValueError(
                f"block {self.block} got {length} tokens, {self.num_prefix_tokens} of them no patches, and the patch "
                f"convolution gave a grid of {grid}; outliers are repaired in calls of the whole model on all patches"
            )
        segments = (Segment("extra", before), Segment("patches", grid[0] * grid[1]))
        return TokenLayout(segments, grid, 1)

    def to_record(self) -> dict[str, Any]:
        """Block and rule."""
        return {"kind": self.kind, "block": self.block, **self.rule.to_record()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> NeighbourRepair:
        """The same block and rule.

        Raises:
            ValueError: for a rule that is not known here.
        """
        rule = RULES.get(str(record["rule"]))
        if rule is None:
            raise ValueError(f"unknown rule {record['rule']!r} of {cls.kind}; known: {', '.join(RULES)}")
        return cls(int(record["block"]), rule.from_record(record, backbone))


def _leave_block(addition: NeighbourRepair, attention: nn.Module, _block: nn.Module, _args: Any, output: Any) -> Any:
    """Repair a block's output: tokens, or a tuple that starts with them."""
    if isinstance(output, tuple):
        first, *rest = output
        return (_leave_block(addition, attention, _block, _args, first), *rest)
    tokens = cast(Tensor, output)
    if getattr(attention, "batch_first", True):
        return addition.repair(tokens)
    return addition.repair(tokens.transpose(0, 1)).transpose(0, 1)  # open_clip towers that run (N, B, D)
