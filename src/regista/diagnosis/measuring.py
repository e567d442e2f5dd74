"""One streaming pass over the images: what a diagnosis needs from each forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.features import Features
from regista.diagnosis.arrays import ArrayStore
from regista.diagnosis.neighbours import neighbour_cosine
from regista.diagnosis.registers import effective_number
from regista.diagnosis.residue import PositionalResidue
from regista.diagnosis.thumbnail import thumbnails
from regista.tokens import TokenLayout

PICTURED = 8


@dataclass
class Measured:
    """Everything read from the model, one row an image.

    Attributes:
        layout: Token layout of every image.
        count: n, images measured.
        arrays: "norms" (n, blocks, N) of all tokens before the final norm; "received"
            (n, blocks, N) mean attention a token receives, mean over heads; "neighbours",
            "scores", "valid", "planted", "consistency" (n, rows, cols); "effective" (n,).
        residue: Positional residue of the final patch features.
        likeness: The same of the pixels' mean colours: how alike the images are.
        pictured: Thumbnails, features and last-block attention maps of the first images.
        queries: What the rows of the attention maps are.
    """

    layout: TokenLayout
    count: int
    arrays: ArrayStore
    residue: PositionalResidue
    likeness: PositionalResidue
    pictured: dict[str, Tensor]
    queries: list[str] = field(default_factory=list)

    def grid(self, name: str) -> Tensor:
        """The patch part of a per-token array as maps: (n, ..., N) -> (n, ..., rows, cols)."""
        values = self.arrays.get(name)
        return self.layout.to_grid(self.layout.take(values, "patches", dim=-1))

    def optional(self, name: str) -> Tensor | None:
        """An array that may not have been measured."""
        return self.arrays.get(name) if name in self.arrays else None

    def valid(self) -> Tensor:
        """Cells that hold image content: (n, rows, cols) bool."""
        return self.arrays.get("valid") > 0.5


def measure(
    backbone: Backbone,
    batches: Iterable[tuple[Tensor, Tensor]],
    capacity: int,
    *,
    attention: bool = True,
    consistency: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Measured:
    """Forward every batch once and keep the reduced values.

    Args:
        batches: (pixels (b, 3, H, W), valid cells (b, rows, cols)) pairs of one size.
        capacity: The most images that can come.
        attention: Also read the attention statistics.
        consistency: (pixels, patch features (b, P, D)) -> (b, rows, cols), costs more forwards.
        progress: Called with the number of images done.

    Raises:
        ValueError: if no image came.
    """
    store = ArrayStore(capacity)
    measured: Measured | None = None
    kept: dict[str, list[Tensor]] = {}
    done = 0
    for pixels, valid in batches:
        layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))
        if measured is None:
            places = layout.num_patches
            residues = PositionalResidue(places, backbone.embed_dim), PositionalResidue(places, 3)
            measured = Measured(layout, 0, store, *residues, {})
        elif layout != measured.layout:
            raise ValueError(f"images of one diagnosis have one size; got {layout} after {measured.layout}")
        features = backbone(pixels, capture=_captures(backbone, layout, attention))
        _store(store, done, backbone, features, valid)
        if consistency is not None:
            store.put("consistency", done, consistency(pixels, features.patches))
        if backbone.planted is not None:
            store.put("planted", done, backbone.planted.mask(pixels).float())
        measured.residue.update(features.patches)
        measured.likeness.update(patch_colours(pixels, layout.patch_size))
        if done < PICTURED:
            room = PICTURED - done
            for name, value in _pictures(backbone, pixels[:room], features, attention).items():
                kept.setdefault(name, []).append(value[:room].cpu())
        done += len(pixels)
        if progress is not None:
            progress(done)
    if measured is None:
        raise ValueError("no image to diagnose")
    measured.count = done
    store.trim(done)
    measured.pictured = {name: torch.cat(values) for name, values in kept.items()}
    measured.queries = _queries(backbone, measured.layout, attention)
    return measured


def _captures(backbone: Backbone, layout: TokenLayout, attention: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    wanted: dict[str, Callable[[Tensor], Tensor]] = {}
    for block in range(backbone.depth):
        wanted[f"blocks.{block}.resid"] = token_norms
        if attention:
            wanted[f"blocks.{block}.attn_received"] = _mean_heads
    if attention and layout.num_prefix_tokens:
        wanted[f"blocks.{backbone.depth - 1}.attn_prefix"] = _mean_heads
    if attention and not layout.count("cls") and backbone.pool_attention() is not None:
        wanted["pool.attn"] = _mean_heads
    if backbone.patch_projection() is not None:
        wanted["patch_embed"] = lambda embedded: neighbour_cosine(embedded, layout.grid_size)
    return wanted


def _store(store: ArrayStore, start: int, backbone: Backbone, features: Features, valid: Tensor) -> None:
    layout, captured = features.layout, features.captured
    blocks = range(backbone.depth)
    store.put("norms", start, torch.stack([captured[f"blocks.{block}.resid"] for block in blocks], 1))
    if "blocks.0.attn_received" in captured:
        received = [captured[f"blocks.{block}.attn_received"] for block in blocks]
        store.put("received", start, torch.stack(received, 1))
    if "patch_embed" in captured:
        store.put("neighbours", start, captured["patch_embed"])
    store.put("valid", start, valid.float())
    pooled = backbone.global_vector(features.tokens, layout).float()
    scores = torch.cosine_similarity(features.patches.float(), pooled.unsqueeze(-2), dim=-1)
    store.put("scores", start, layout.to_grid(scores))
    if layout.num_register_tokens:
        store.put("effective", start, effective_number(features.registers))


def _pictures(backbone: Backbone, pixels: Tensor, features: Features, attention: bool) -> dict[str, Tensor]:
    layout, captured = features.layout, features.captured
    pictures = {"thumbnails": thumbnails(backbone, pixels.float().cpu()), "patches": features.patches.float()}
    if not attention:
        return pictures
    prefix = captured.get(f"blocks.{backbone.depth - 1}.attn_prefix")
    pool = captured.get("pool.attn")
    last = captured[f"blocks.{backbone.depth - 1}.attn_received"].unsqueeze(1)
    if pool is not None:
        rows = layout.to_grid(pool)
    elif layout.count("cls") and prefix is not None:
        rows = layout.to_grid(layout.take(prefix, "patches", dim=-1))
    else:
        maps = [last] if prefix is None else [last, prefix]
        rows = torch.cat([layout.to_grid(layout.take(value, "patches", dim=-1)) for value in maps], 1)
    return {**pictures, "attention": rows.float()}


def _queries(backbone: Backbone, layout: TokenLayout, attention: bool) -> list[str]:
    if not attention:
        return []
    prefix: list[str] = []
    for name, count in layout.segments:
        label = {"cls": "CLS", "registers": "register", "extra": "extra token"}.get(name)
        if label is not None:
            prefix += [label if name == "cls" else f"{label} {index}" for index in range(count)]
    if layout.count("cls"):
        return prefix
    return ["pooling query"] if backbone.pool_attention() is not None else ["mean over queries", *prefix]


def token_norms(tokens: Tensor) -> Tensor:
    """L2 norm over channels in float32: (B, N, D) -> (B, N)."""
    norms: Tensor = torch.linalg.vector_norm(tokens.float(), dim=-1)
    return norms


def patch_colours(pixels: Tensor, patch_size: int) -> Tensor:
    """Mean colour of each patch: (B, 3, H, W) -> (B, P, 3)."""
    return torch.nn.functional.avg_pool2d(pixels.float(), patch_size).flatten(2).transpose(1, 2)


def _mean_heads(attention: Tensor) -> Tensor:
    return attention.mean(1)
