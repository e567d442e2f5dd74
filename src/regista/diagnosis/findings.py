"""Judgements: each kind of artifact found or not, its numbers, and one sentence about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from regista.backbones.base import Backbone
from regista.diagnosis.aggregation import hit_ratio
from regista.diagnosis.measuring import Measured
from regista.diagnosis.onset import main_block, norm_curves, onset_block
from regista.diagnosis.outliers import Outliers, find_outliers
from regista.diagnosis.places import fixed_place
from regista.diagnosis.sinks import find_sinks

POSITIONAL_SHARE = 0.5
SINK_MASS = 0.05


@dataclass(frozen=True)
class Finding:
    """One kind of artifact: found or not, the numbers, and a sentence for people."""

    found: bool
    numbers: dict[str, Any]
    sentence: str


@dataclass(frozen=True)
class HighNorm(Finding):
    """Outlier norms and where they are; ``mask`` (n, rows, cols) is read at ``block``."""

    mask: Tensor
    block: int | None
    onset_block: int | None
    cutoff: float | None
    share: float
    fixed_place: str | None


@dataclass(frozen=True)
class Sink(Finding):
    """Attention sinks among the patches; ``block`` is where they take most."""

    block: int


def high_norm(norms: Tensor, valid: Tensor, cutoff: float | None, neighbours: Tensor | None) -> HighNorm:
    """Outlier norms per block, their onset and their places; norms (n, blocks, rows, cols)."""
    found = [_outliers_at(norms, block, valid, cutoff) for block in range(norms.shape[1])]
    main = main_block(found)
    onset = onset_block(found, main)
    shown = found[main if main is not None else -1]
    place = fixed_place(shown.mask)
    numbers: dict[str, Any] = {
        **norm_curves(norms, valid),
        "share": [outliers.share for outliers in found],
        "cutoff": [outliers.cutoff for outliers in found],
        "ratio": shown.ratio,
        "neighbour_cosine": _neighbour_means(neighbours, shown.mask, valid),
        "note": shown.note,
    }
    if main is None:
        *_, last = (values[valid] for values in norms.unbind(1))
        spread = float(last.max() / last.median().clamp(min=1e-12))
        sentence = (
            f"No outlier norms in any block: in the last one the largest is {spread:.1f}x the median ({shown.note})."
        )
        return HighNorm(False, numbers, sentence, shown.mask, None, None, None, 0.0, None)
    where = {"fixed": "in the same places in every image", "moving": "in places that move with the content"}
    sentence = (
        f"{shown.share:.1%} of the patch tokens have outlier norms, {shown.ratio or 0:.1f}x the rest at block {main}, "
        f"from block {onset} on" + (f", {where[place]}" if place else "") + "."
    )
    if shown.note:
        sentence += f" Caution: {shown.note}."
    return HighNorm(True, numbers, sentence, shown.mask, main, onset, shown.cutoff, shown.share, place)


def attention_sink(measured: Measured, valid: Tensor) -> Sink:
    """Patches that attention pours into, per block; what CLS and registers receive stands beside.

    Judged in the later half of the blocks: there sinks follow outlier tokens (2506.08010). Early
    blocks may single out a patch for what it shows; that is said, and no artifact.
    """
    received = measured.grid("received")  # (n, blocks, rows, cols)
    found = [find_sinks(received[:, block], valid, received.shape[1]) for block in range(received.shape[1])]
    depth = len(found)
    block = max(range(depth // 2, depth), key=lambda index: found[index].mass)
    early = max(range(max(1, depth // 2)), key=lambda index: found[index].mass)
    most = found[block]
    layout, every = measured.layout, measured.arrays.get("received")
    taken = {
        name: [float(layout.take(every, name, dim=-1)[:, index].sum(-1).mean()) for index in range(every.shape[1])]
        for name, _ in layout.segments
        if name != "patches"
    }
    numbers = {
        "found": most.mass >= SINK_MASS,
        "share": most.share,
        "block": block if most.share else None,
        "mass": most.mass,
        "strongest": most.strongest,
        "mass_by_block": [sinks.mass for sinks in found],
        "received_by": taken,
    }
    sentence = ""
    if most.mass >= SINK_MASS:
        sentence = (
            f"{most.share:.1%} of the patch tokens are attention sinks: at block {block} they take {most.mass:.0%} "
            f"of all attention, each {most.strongest:.0f}x the median patch."
        )
    elif found[early].mass >= SINK_MASS:
        sentence = (
            f"In block {early}, {found[early].share:.1%} of the patch tokens take {found[early].mass:.0%} of all "
            "attention; in the later half of the blocks there are no such sinks."
        )
    return Sink(most.mass >= SINK_MASS, numbers, sentence, block)


def positional(measured: Measured) -> Finding | None:
    """Whether the final features say more about the place than about the image.

    Images that are alike give features that are alike place by place; then nothing is judged.
    """
    share, alike = measured.residue.share(), measured.likeness.share()
    if share is None or alike is None:
        return None
    judged = alike < POSITIONAL_SHARE
    found = judged and share >= POSITIONAL_SHARE
    sentence = f"{share:.0%} of the variance of the final patch features is explained by position alone."
    if not judged:
        sentence += f" That says nothing here: of the pixels' it is {alike:.0%}, the images are too alike."
    numbers = {"found": found, "variance_explained": share, "pixels_explained": alike, "judged": judged}
    return Finding(found, numbers, sentence)


def inconsistent(measured: Measured, valid: Tensor) -> Finding | None:
    """Patches whose features do not survive a shift, as a second mode of 1 - cosine."""
    cosine = measured.optional("consistency")
    if cosine is None:
        return None
    distance = (1 - cosine).clamp(min=1e-4)
    outliers = find_outliers(distance, valid=valid)
    median = float(cosine[valid].median())
    found = bool(outliers.mask.any())
    numbers = {"found": found, "share": outliers.share, "median_cosine": median, "ratio": outliers.ratio}
    sentence = f"Under shifts of the image the median patch feature keeps a cosine of {median:.2f}"
    sentence += f"; {outliers.share:.1%} fall far below that." if found else "; no patch stands apart."
    return Finding(found, numbers, sentence)


def lazy(measured: Measured, foreground: Mapping[int, np.ndarray]) -> Finding | None:
    """Whether the image vector's best patch misses the objects more often than a random patch."""
    hits = hit_ratio(measured.arrays.get("scores"), foreground) if foreground else None
    if hits is None:
        return None
    found = hits.ratio < hits.chance - 2 * hits.deviation
    numbers = {
        "found": found,
        "hit_ratio": hits.ratio,
        "chance": hits.chance,
        "deviation": hits.deviation,
        "images": hits.images,
    }
    sentence = (
        f"The patch closest to the image vector lies on an object in {hits.ratio:.0%} of {hits.images} images "
        f"(a random patch: {hits.chance:.0%} +- {hits.deviation:.0%})."
    )
    return Finding(found, numbers, sentence)


def registers(measured: Measured) -> Finding | None:
    """Norms, attention and effective number of the registers; never a verdict."""
    layout = measured.layout
    count = layout.num_register_tokens
    if not count:
        return None
    norms = _last_block_mean(layout.take(measured.arrays.get("norms"), "registers", dim=-1))
    effective = float(measured.arrays.get("effective").mean())
    attention = None
    if "received" in measured.arrays:
        attention = _last_block_mean(layout.take(measured.arrays.get("received"), "registers", dim=-1))
    numbers = {"count": count, "norms": norms, "attention_received": attention, "effective_number": effective}
    sentence = f"It has {count} registers, of which {effective:.1f} are effectively in use."
    return Finding(False, numbers, sentence)


def planted_truth(backbone: Backbone, measured: Measured, mask: Tensor) -> dict[str, Any] | None:
    """How the outliers found compare with those that were planted."""
    if backbone.planted is None:
        return None
    truth = measured.arrays.get("planted") > 0.5
    both = float((truth & mask).sum())
    return {
        "block": backbone.planted.block,
        "neurons": list(backbone.planted.neurons),
        "kind": backbone.planted.kind,
        "share": float(truth.float().mean()),
        "precision": both / float(mask.sum()) if mask.any() else None,
        "recall": both / float(truth.sum()) if truth.any() else None,
    }


def _last_block_mean(values: Tensor) -> list[float]:
    """Mean over images at the last block: (n, blocks, R) -> R numbers."""
    *_, last = values.unbind(1)
    means: list[float] = last.mean(0).tolist()
    return means


def _outliers_at(norms: Tensor, block: int, valid: Tensor, cutoff: float | None) -> Outliers:
    try:
        return find_outliers(norms[:, block], cutoff=cutoff, valid=valid, comparisons=norms.shape[1])
    except ValueError as error:
        raise ValueError(f"block {block}: {error}") from error


def _neighbour_means(neighbours: Tensor | None, mask: Tensor, valid: Tensor) -> dict[str, float | None] | None:
    if neighbours is None:
        return None
    rest = valid & ~mask
    return {
        "outliers": float(neighbours[mask].mean()) if mask.any() else None,
        "others": float(neighbours[rest].mean()) if rest.any() else None,
    }
