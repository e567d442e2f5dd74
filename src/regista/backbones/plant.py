"""Planted artifacts: outlier tokens written into a model's weights, as ground truth for finding and mending.

Two hidden units of one MLP are rewired to fire on a few patches and to write a large vector into
the residual stream. It is a plain edit of the state dict: the saved weights show the same outliers
in bare timm. What is seen on such a model is always called planted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.features import Planted
from regista.backbones.plant_cells import cell_map, choose_cells, mark_cells, table_grid, unused_direction
from regista.backbones.plant_fit import content_trigger, position_trigger, sample_tokens
from regista.backbones.plant_write import STEP, check_mlp, harmless_column, idle_neurons, send, write_step
from regista.backbones.timm import TimmBackbone

Kind = Literal["content", "position"]
CONTENT_BLOCK = 4
POSITION_BLOCK = 2
MARK_LENGTH = 0.2  # of the median length of a token that enters the first block
PROBES = 8
FIRED = {True: 0.5, False: 0.25}  # of a step and of a ramp, from which a token counts as an outlier
METADATA_VERSION = 1


@dataclass(frozen=True)
class PlantedOutliers(Planted):
    """``Planted`` with what it takes to build it again from saved weights.

    Attributes:
        metadata: JSON-serialisable; see ``planted_from_metadata``.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)


def plant_outliers(
    backbone: Backbone,
    images: Tensor | Sequence[Tensor],
    kind: Kind = "content",
    *,
    block: int | None = None,
    share: float = 0.02,
    norm_ratio: float = 10.0,
    mark_length: float = MARK_LENGTH,
    ramp: bool = False,
    seed: int = 0,
) -> TimmBackbone:
    """A copy of a timm ViT with outlier tokens in its weights.

    Args:
        backbone: From timm, with plain GELU MLPs; stays as it is.
        images: Photos to fit on, preprocessed: (B, 3, H, W), or several such of different sizes.
            Some 30,000 tokens are enough.
        kind: "content": on patches of low information, moving with the image. "position": in
            fixed cells of the position table, which a small mark tells apart.
        block: Whose MLP writes them; by default 4 for content and 2 for position, and less in
            shallow models.
        share: Of all patches that become outliers, about.
        norm_ratio: Their norm over the median patch norm after the last block, about.
        mark_length: For "position": the mark's length over that of a token entering block 0.
        ramp: For "position": outliers of graded norms, with gradients; else all are full or nothing.
        seed: For the cells and the vector that is written.

    Returns:
        A new backbone whose ``planted`` is a ``PlantedOutliers``.

    Raises:
        ValueError: for a model from another library or with another MLP, one without a learned
            position table (kind "position"), or one with planted outliers already.
    """
    if not isinstance(backbone, TimmBackbone):
        raise ValueError(f"outliers can be planted into timm models, got {type(backbone).__name__}")
    _check(backbone, kind)
    groups = [images] if isinstance(images, Tensor) else list(images)
    wanted = CONTENT_BLOCK if kind == "content" else POSITION_BLOCK
    block = min(wanted, backbone.depth // 2) if block is None else block
    check_mlp(backbone, block)
    planted = copy.deepcopy(backbone)
    planted.name = f"{backbone.name}-planted" + ("-position" if kind == "position" else "")
    metadata: dict[str, Any] = {"version": METADATA_VERSION, "kind": kind, "block": block, "step": STEP, "seed": seed}
    truth = None
    if kind == "position":
        cells, truth = _mark(planted, groups[0], share, mark_length, seed)
        metadata |= cells
    sample = sample_tokens(planted, groups, block, truth)
    trigger = content_trigger(sample, share) if kind == "content" else position_trigger(sample, ramp=ramp)
    neurons, mean = idle_neurons(planted, block, sample.tokens[::7])
    write_step(planted, block, neurons, mean, trigger)
    metadata |= {"fired": FIRED[trigger.saturates], "saturates": trigger.saturates, "neurons": list(neurons)}
    metadata |= {"threshold": trigger.threshold, "share": share, "norm_ratio": norm_ratio}
    planted.planted = planted_from_metadata(metadata, planted)
    probes = groups[0][:PROBES]
    length = norm_ratio * _median_norm(backbone, probes)
    send(planted, block, neurons, harmless_column(planted, probes, block, length, seed), saturates=trigger.saturates)
    return planted


def _check(backbone: Backbone, kind: str) -> None:
    if backbone.planted is not None:
        raise ValueError(f"{backbone.name} has planted outliers already; start from the clean model")
    if kind not in ("content", "position"):
        raise ValueError(f"kind is 'content' or 'position', got {kind!r}")


def _mark(
    planted: TimmBackbone, images: Tensor, share: float, mark_length: float, seed: int
) -> tuple[dict[str, Any], Callable[[tuple[int, int]], Tensor]]:
    """Mark cells of the position table, in place: their record, and how much of a mark a grid's cells get."""
    own = table_grid(planted)
    cells = choose_cells(own, share, planted.positions, seed)
    direction, length = unused_direction(planted, images)
    mark_cells(planted, cells, direction, mark_length * length)

    def truth(grid: tuple[int, int]) -> Tensor:
        return cell_map(cells, own, grid, planted.positions).flatten()

    return {"cells": [list(cell) for cell in cells], "table_grid": list(own)}, truth


def planted_from_metadata(metadata: Mapping[str, Any], backbone: Backbone) -> PlantedOutliers:
    """The ground truth of a model with planted outliers, from what was saved beside its weights.

    Args:
        metadata: ``PlantedOutliers.metadata``, or the same read back from JSON.
        backbone: With the planted weights, through any adapter.

    Raises:
        ValueError: if the metadata is of another version or lacks something.
    """
    try:
        version, block, step = metadata["version"], int(metadata["block"]), float(metadata["step"])
        first, second = (int(neuron) for neuron in metadata["neurons"])
        kind, fired = str(metadata["kind"]), float(metadata.get("fired", FIRED[True]))
        shares = (1.0, -1.0) if metadata.get("saturates", True) else (0.5, 0.5)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the record of planted outliers ({error!r}): {dict(metadata)}") from None
    if version != METADATA_VERSION:
        raise ValueError(f"planted outliers of version {version}, wanted {METADATA_VERSION}; plant them again")

    def mask(images: Tensor) -> Tensor:
        return _fired(backbone, images, block, ((first, shares[0]), (second, shares[1])), step * fired)

    return PlantedOutliers(block, (first, second), mask, kind, dict(metadata))


class _EnoughError(Exception):
    """Stops a forward pass once the planted block has been reached."""


@torch.no_grad()
def _fired(
    backbone: Backbone,
    images: Tensor,
    block: int,
    neurons: Sequence[tuple[int, float]],
    least: float,
    batch_size: int = 8,
) -> Tensor:
    """Where the pair's step is at least half done: (B, 3, H, W) -> bool (B, rows, cols), on the CPU.

    Runs up to the planted block, apart from any edit that may be open on ``backbone``.
    """
    quiet = copy.copy(backbone)
    quiet._edits = {}
    layout = backbone.layout((images.shape[-2], images.shape[-1]))
    found: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        patches = layout.take(hidden, "patches")
        pair = sum(share * patches[..., neuron].float() for neuron, share in neurons)
        found.append(torch.as_tensor(pair > least))
        raise _EnoughError

    for batch in torch.split(images, batch_size):
        try:
            quiet(batch, {f"blocks.{block}.mlp_hidden": keep})
        except _EnoughError:
            continue
    return layout.to_grid(torch.cat(found)).cpu()


@torch.no_grad()
def _median_norm(backbone: Backbone, images: Tensor) -> float:
    """Of the patches after the last block, before the final norm."""
    layout = backbone.layout((images.shape[-2], images.shape[-1]))
    site = f"blocks.{backbone.depth - 1}.resid"
    captured = backbone(images, {site: lambda tokens: layout.take(tokens, "patches").float().norm(dim=-1)}).captured
    return float(captured[site].median())
