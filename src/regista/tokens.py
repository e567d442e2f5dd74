"""What a token sequence is: the only place where tokens are sliced.

Letters used for shapes across the project:
B batch, N all tokens, P patch tokens, R register tokens, D width, H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("cls", "registers", "patches", "extra")


def square_grid(num_patches: int) -> tuple[int, int]:
    """(rows, cols) of a square grid, for files that store a number of patches and no shape.

    Raises:
        ValueError: if no square has that many patches.
    """
    side = math.isqrt(max(num_patches, 0))
    if side < 1 or side * side != num_patches:
        raise ValueError(f"{num_patches} patches do not fill a square grid; say the image size the weights are for")
    return side, side


class Segment(NamedTuple):
    """A run of neighbouring tokens of one kind."""

    name: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


@dataclass(frozen=True)
class TokenLayout:
    """Ordered, named segments of a ViT's token sequence, in the model's own order.

    Args:
        segments: (name, count) pairs in sequence order; names from ``NAMES``, each at most
            once, ``patches`` always. Pairs with a count of 0 are dropped.
        grid_size: (rows, cols) of the patch grid; rows * cols equals the patch count.
        patch_size: Side of a square patch in pixels.

    Raises:
        ValueError: for an unknown or repeated name, or a patch count that is not rows * cols.
    """

    segments: tuple[Segment, ...]
    grid_size: tuple[int, int]
    patch_size: int

    def __post_init__(self) -> None:
        kept = tuple(Segment(name, int(count)) for name, count in self.segments if count != 0)
        names = [name for name, _ in kept]
        unknown = [name for name in names if name not in NAMES]
        if unknown or len(set(names)) != len(names) or any(count < 0 for _, count in kept):
            raise ValueError(f"segments must be distinct names of {NAMES} with counts >= 0, got {self.segments}")
        rows, cols = (int(cells) for cells in self.grid_size)
        patches = dict(kept).get("patches", 0)
        if rows < 1 or cols < 1 or patches != rows * cols:
            raise ValueError(f"{patches} patch tokens do not fill a grid of {rows} rows x {cols} cols")
        object.__setattr__(self, "segments", kept)
        object.__setattr__(self, "grid_size", (rows, cols))

    @classmethod
    def of(
        cls,
        grid_size: tuple[int, int],
        patch_size: int,
        *,
        num_cls_tokens: int = 1,
        num_register_tokens: int = 0,
        order: Iterable[str] = ("cls", "registers", "patches"),
    ) -> TokenLayout:
        """Layout from counts, in the order [cls, registers, patches] unless told otherwise."""
        counts = {"cls": num_cls_tokens, "registers": num_register_tokens, "patches": grid_size[0] * grid_size[1]}
        return cls(tuple(Segment(name, counts[name]) for name in order), grid_size, patch_size)

    @property
    def num_tokens(self) -> int:
        """N, the length of the whole sequence."""
        return sum(count for _, count in self.segments)

    @property
    def num_patches(self) -> int:
        """P = rows * cols."""
        return self.count("patches")

    @property
    def num_register_tokens(self) -> int:
        """R."""
        return self.count("registers")

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens that are not patches, wherever they stand."""
        return self.num_tokens - self.num_patches

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels that this grid covers."""
        return self.grid_size[0] * self.patch_size, self.grid_size[1] * self.patch_size

    def count(self, name: str) -> int:
        """Number of tokens in a segment; 0 if the model has none."""
        self._check_name(name)
        return dict(self.segments).get(name, 0)

    def slice(self, name: str) -> slice:
        """Where a segment stands in the sequence; an empty slice if the model has none."""
        self._check_name(name)
        start = 0
        for segment, count in self.segments:
            if segment == name:
                return slice(start, start + count)
            start += count
        return slice(0, 0)

    def take(self, x: Tensor, name: str, dim: int = -2) -> Tensor:
        """One segment of ``x``: (B, N, D) -> (B, count, D), or along another dimension."""
        self.check(x, dim)
        where = self.slice(name)
        return x.narrow(dim, where.start, where.stop - where.start)

    def split(self, x: Tensor, dim: int = -2) -> dict[str, Tensor]:
        """All segments by name: (B, N, D) -> {name: (B, count, D)}; absent ones have count 0."""
        return {name: self.take(x, name, dim) for name in NAMES if name != "extra" or self.count(name)}

    def join(self, parts: Mapping[str, Tensor], dim: int = -2) -> Tensor:
        """The inverse of ``split``: {name: (B, count, D)} -> (B, N, D)."""
        for name in (*parts, *(name for name, _ in self.segments)):
            got = parts[name].shape[dim] if name in parts else 0
            if got != self.count(name):
                raise ValueError(f"part {name!r} has {got} tokens, the layout has {self.count(name)} ({self})")
        return torch.cat([parts[name] for name, _ in self.segments], dim)

    def patch_map(self, x: Tensor) -> Tensor:
        """Patch tokens as a map: (B, N, D) -> (B, D, rows, cols)."""
        return self.to_grid(self.take(x, "patches").transpose(-1, -2))

    def to_grid(self, values: Tensor) -> Tensor:
        """One value a patch: (..., P) -> (..., rows, cols)."""
        if values.shape[-1] != self.num_patches:
            raise ValueError(f"got {values.shape[-1]} values for {self.num_patches} patches ({self})")
        return torch.unflatten(values, -1, self.grid_size)  # (..., rows, cols)

    def attention_block(self, attention: Tensor, query: str, key: str) -> Tensor:
        """Attention from one segment to another: (..., N, N) -> (..., n_query, n_key)."""
        return self.take(self.take(attention, query, -2), key, -1)

    def with_registers(self, count: int, *, after: str = "cls") -> TokenLayout:
        """The same layout with ``count`` registers.

        They keep their place where there are some; new ones stand behind segment ``after``,
        or first where there is no such segment.
        """
        order = [name for name, _ in self.segments]
        if "registers" not in order:
            order.insert(order.index(after) + 1 if after in order else 0, "registers")
        counts = {**dict(self.segments), "registers": count}
        return TokenLayout(tuple(Segment(name, counts[name]) for name in order), self.grid_size, self.patch_size)

    def with_grid(self, grid_size: tuple[int, int]) -> TokenLayout:
        """The same segments over another patch grid."""
        counts = {**dict(self.segments), "patches": grid_size[0] * grid_size[1]}
        segments = tuple(Segment(name, counts[name]) for name, _ in self.segments)
        return TokenLayout(segments, grid_size, self.patch_size)

    def insert_registers(self, x: Tensor, registers: Tensor) -> tuple[Tensor, TokenLayout]:
        """Replace the registers of ``x``: (B, N, D), (B, R, D) -> (B, N', D) and its layout."""
        layout = self.with_registers(registers.shape[-2])
        return layout.join({**self.split(x), "registers": registers}), layout

    def remove_registers(self, x: Tensor) -> tuple[Tensor, TokenLayout]:
        """Drop the registers of ``x``: (B, N, D) -> (B, N - R, D) and its layout."""
        return self.insert_registers(x, self.take(x, "registers").narrow(-2, 0, 0))

    def check(self, x: Tensor, dim: int = -2) -> None:
        """Raise ``ValueError`` with both numbers if ``x`` is not N tokens long along ``dim``."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(f"got {x.shape[dim]} tokens, the layout has {self.num_tokens} ({self})")

    def __str__(self) -> str:
        rows, cols = self.grid_size
        parts = " + ".join(f"{count} {name}" for name, count in self.segments)
        return f"{parts}; grid {rows} rows x {cols} cols, patch {self.patch_size} px"

    @staticmethod
    def _check_name(name: str) -> None:
        if name not in NAMES:
            raise ValueError(f"unknown segment {name!r}; one of {NAMES}")
