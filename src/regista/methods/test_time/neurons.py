"""Finding the MLP units that write outlier tokens (2506.08010, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.known_outliers import OutlierRule, outlier_rule, some_of
from regista.diagnosis.measuring import token_norms
from regista.diagnosis.source import ImageSource
from regista.tokens import TokenLayout

MOST = 100  # neurons that a gap may leave above it
SMALLEST_GAP = 1.25
LEAST = 0.01  # of the highest score: what is below counts as that
Neuron = tuple[int, int, float]


def find_register_neurons(
    backbone: Backbone,
    images: Any,
    *,
    top_k: int | None = None,
    cutoff: float | None = None,
    last_block: int | None = None,
    batch_size: int = 8,
) -> list[Neuron]:
    """The MLP units that are most active on outlier patches.

    The score of a unit is the mean over images of its mean activation (the input of the MLP's last
    linear layer) over the image's outlier patches; images without outliers do not count. The norm and the onset of
    the outliers are read from at most 32 of the images, the scores from all.

    Args:
        images: As ``regista.diagnose`` takes them.
        top_k: How many; None cuts at the widest gap in the scores.
        cutoff: Norm from which a patch token is an outlier; found in the norms if None.
        last_block: The last block that is searched; the outliers' onset if None. With both given, as in the
            paper, the cutoff is that of the last block's output and one pass over the images is all.
        batch_size: Images a forward; the result does not depend on it.

    Returns:
        (block, unit, score), the highest score first.

    Raises:
        ValueError: if the images show no outliers, so that there is nothing to score.
    """
    if isinstance(images, Iterator):  # they are looked at twice
        images = list(images)
    if cutoff is not None and not 0 < cutoff < math.inf:
        raise ValueError(f"cutoff is a positive norm, got {cutoff}")
    if cutoff is not None and last_block is not None:
        rule, last = OutlierRule(backbone.depth - 1, cutoff, last_block), last_block
    else:
        rule = outlier_rule(backbone, some_of(images), cutoff=cutoff, batch_size=batch_size)
        last = rule.onset if last_block is None else last_block
    scores = neuron_scores(backbone, images, rule, last, batch_size=batch_size)
    return top_neurons(scores, top_k)


@torch.inference_mode()
def neuron_scores(
    backbone: Backbone,
    images: Any,
    rule: OutlierRule,
    last_block: int,
    *,
    batch_size: int = 8,
) -> Tensor:
    """Mean activation of every unit on outlier patches: (blocks up to ``last_block``, hidden) float32, on the CPU.

    One forward an image up to the block that tells the outliers; only sums over outliers are kept.

    Raises:
        ValueError: for a block the model does not have, and if no patch is an outlier.
    """
    if not 0 <= last_block < backbone.depth:
        raise ValueError(f"{backbone.name} has blocks 0 to {backbone.depth - 1}, got last_block={last_block}")
    total: Tensor | None = None
    counted = 0
    for hidden, mask in _activations(backbone, images, rule, last_block, batch_size):
        sick = mask.any(-1)  # (B,)
        weights = mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)  # (B, P)
        means = torch.stack([_mean_over(mask, weights, activation) for activation in hidden])  # (blocks, hidden)
        total = means if total is None else total + means
        counted += int(sick.sum())
    if total is None or not counted:
        raise ValueError(f"{backbone.name}: no patch is above the cutoff {rule.cutoff:.4g} at block {rule.block}")
    return (total / counted).cpu()


def top_neurons(scores: Tensor, top_k: int | None) -> list[Neuron]:
    """The units of highest score: (blocks, hidden) -> [(block, unit, score)], highest first.

    Args:
        top_k: How many; None cuts at the widest relative gap among the first hundred. Without a gap
            of 1.25x all hundred are given.
    """
    count = scores.numel()
    if top_k is not None and not 0 <= top_k <= count:
        raise ValueError(f"top_k is 0 to {count}, got {top_k}")
    ordered, places = scores.flatten().sort(descending=True, stable=True)
    if top_k is None:
        top_k = _gap(ordered.narrow(0, 0, min(MOST + 1, count)).tolist())
    chosen = zip(ordered.tolist(), places.tolist(), strict=True)
    width = scores.shape[-1]
    return [(place // width, place % width, score) for score, place in (next(chosen) for _ in range(top_k))]


def _gap(ordered: list[float]) -> int:
    """How many stand above the widest relative gap."""
    floor = max(ordered[0] * LEAST, 1e-12)  # or the step to zero and below would be the widest
    ratios = [high / max(low, floor) if high > floor else 1.0 for high, low in pairwise(ordered)]
    if not ratios or max(ratios) < SMALLEST_GAP:
        return min(MOST, len(ordered))
    return ratios.index(max(ratios)) + 1


def _activations(
    backbone: Backbone, images: Any, rule: OutlierRule, last_block: int, batch_size: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Per batch: hidden units of each block (B, P, hidden) and where the outliers are (B, P)."""
    source = ImageSource(backbone, images, DiagnosisConfig(batch_size=batch_size))
    for pixels, valid in source:
        layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))
        reading = _Reading(layout, last_block)
        captures: dict[str, Callable[[Tensor], Tensor]] = {
            f"blocks.{block}.mlp_hidden": partial(reading.keep, block) for block in range(last_block + 1)
        }
        captures[f"blocks.{rule.block}.resid"] = reading.judge
        with suppress(_EnoughError):
            backbone(pixels, captures)
        mask = (reading.norms > rule.cutoff) & valid.flatten(1).to(reading.norms.device)
        yield [reading.hidden[block] for block in range(last_block + 1)], mask


class _EnoughError(Exception):
    """Stops a forward pass when all is read."""


class _Reading:
    """Hidden units of the patches, and their norms at one block, of one forward."""

    def __init__(self, layout: TokenLayout, last_block: int) -> None:
        self.layout, self.last_block = layout, last_block
        self.hidden: dict[int, Tensor] = {}
        self.norms = torch.empty(0)

    def keep(self, block: int, value: Tensor) -> Tensor:
        self.hidden[block] = self.layout.take(value, "patches")
        return self.reached(value)

    def judge(self, tokens: Tensor) -> Tensor:
        self.norms = token_norms(self.layout.take(tokens, "patches"))
        return self.reached(tokens)

    def reached(self, value: Tensor) -> Tensor:
        """Stop if nothing is left to be read."""
        if self.norms.numel() and self.last_block in self.hidden:
            raise _EnoughError
        return value


def _mean_over(mask: Tensor, weights: Tensor, activation: Tensor) -> Tensor:
    """Sum over images of the mean over outliers: (B, P), (B, P, hidden) -> (hidden,) float32."""
    return (activation[mask].float() * weights[mask].unsqueeze(-1)).sum(0)
