"""Finds the direction that tells the tokens to be made outliers from all others.

One linear unit must do it, so the direction is linear discriminant analysis: the difference of
the class means, whitened by the covariance of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.backbones.base import evaluation_mode
from regista.backbones.timm import TimmBackbone

ROUNDS = 10  # of choosing the positives anew by the direction found
LOW_INFORMATION = 0.3  # positives are among this share of an image's patches
RIDGE = 0.01  # times the mean variance
FULL = 0.5  # of the marked tokens are below the nominal height
STEP_WIDTH = 0.02  # in standard deviations of the score: narrow, so that few tokens lie on the step
PLACE_WEIGHT = 10.0  # how much a score that depends on the place counts as noise


@dataclass(frozen=True)
class Trigger:
    """A linear score of an MLP's input with the place and width of its step.

    Attributes:
        direction: (D,); the score is its product with the token after the block's second norm.
        threshold: Score at which the step is half done.
        width: Scores over which it rises.
        saturates: A step that is centred on the threshold; else a ramp that begins there and never ends.
    """

    direction: Tensor
    threshold: float
    width: float
    saturates: bool = True


@dataclass(frozen=True)
class TokenSample:
    """MLP inputs of one block over many images.

    Attributes:
        tokens: (T, D) float32.
        image: (T,) index of the image a token comes from.
        rank: (T,) information of its patch within its image, 0 the lowest to 1; inf where the
            token is not a patch.
        truth: (T,) value given for its cell, 0 where the token is not a patch.
        place: (D, D) covariance of the per-position means: what depends on the place alone.
    """

    tokens: Tensor
    image: Tensor
    rank: Tensor
    truth: Tensor
    place: Tensor

    @property
    def patches(self) -> Tensor:
        """(T,) True where the token is a patch."""
        return torch.isfinite(self.rank)


class _EnoughError(Exception):
    """Stops a forward pass once the block has been reached."""


@torch.no_grad()
def mlp_inputs(backbone: TimmBackbone, images: Tensor, block: int, *, batch_size: int = 8) -> Tensor:
    """Tokens after the second norm of a block: (B, 3, H, W) -> (B, N, D). Later blocks do not run."""
    found: list[Tensor] = []

    def keep(_module: object, args: tuple[Tensor, ...]) -> None:
        found.append(args[0].detach().float())
        raise _EnoughError

    handle = backbone.vit.blocks[block].mlp.fc1.register_forward_pre_hook(keep)
    try:
        with evaluation_mode(backbone.module), backbone.prepared((images.shape[-2], images.shape[-1])):
            for batch in torch.split(images.to(backbone.device, backbone.dtype), batch_size):
                with suppress(_EnoughError):
                    backbone.forward_tokens(batch)
    finally:
        handle.remove()
    return torch.cat(found)


def sample_tokens(
    backbone: TimmBackbone,
    groups: Sequence[Tensor],
    block: int,
    truth: Callable[[tuple[int, int]], Tensor] | None = None,
) -> TokenSample:
    """MLP inputs of a block over groups of images, (B, 3, H, W) each.

    Args:
        truth: (rows, cols) -> (P,) value of each cell, for outliers that sit in fixed cells.
    """
    tokens, images, ranks, truths = [], [], [], []
    place = torch.zeros(backbone.embed_dim, backbone.embed_dim, dtype=torch.float64)
    count = 0
    for group in groups:
        layout = backbone.layout((group.shape[-2], group.shape[-1]))
        inputs = mlp_inputs(backbone, group, block).cpu()  # (B, N, D)
        rank = torch.full(inputs.shape[:2], torch.inf)
        layout.take(rank, "patches", -1).copy_(_information_rank(group.cpu(), backbone.patch_size))
        cells = torch.zeros(inputs.shape[:2])
        if truth is not None:
            layout.take(cells, "patches", -1).copy_(truth(layout.grid_size))
        place += _place_covariance(layout.take(inputs, "patches")) * inputs.shape[0] * inputs.shape[1]
        index = torch.arange(count, count + len(group))
        count += len(group)
        tokens.append(inputs.flatten(0, 1))
        images.append(index.repeat_interleave(inputs.shape[1]))
        ranks.append(rank.flatten())
        truths.append(cells.flatten())
    joined = torch.cat(tokens)
    values, vectors = torch.linalg.eigh(place / len(joined))
    place = (vectors * values.clamp_min(0)) @ vectors.T
    return TokenSample(joined, torch.cat(images), torch.cat(ranks), torch.cat(truths), place)


def content_trigger(sample: TokenSample, share: float) -> Trigger:
    """Fires on a share of the patches: those of low information that stand out most.

    The positives are first the patches of least pixel variance in each image, then, round by
    round, those of each image with the highest score among its low-information patches. So
    every image gets about as many, also one that is mostly sky. What depends on the place alone
    counts as noise, or the direction would drift to the border.
    """
    whitener = _regularised(sample, PLACE_WEIGHT)
    total = sample.tokens.sum(0, dtype=torch.float64)
    allowed = sample.rank < LOW_INFORMATION
    positive = _top_of_each_image(-sample.rank, sample.image, share) & sample.patches
    score = direction = torch.empty(0)
    for _ in range(ROUNDS):
        direction, score = _discriminant(sample, whitener, total, positive)
        positive = _top_of_each_image(score.where(allowed, -torch.inf), sample.image, share) & allowed
    threshold = float(torch.quantile(score[sample.patches].double(), 1 - share))
    return Trigger(direction, threshold, width=STEP_WIDTH)


def position_trigger(sample: TokenSample, *, ramp: bool = False) -> Trigger:
    """Fires where ``truth`` is above one half (cells that lie between two are left out of the fit).

    Args:
        ramp: Without a plateau: as real register neurons do, the pair answers the more the further a token
            is beyond the threshold, so that training finds a gradient on every outlier.
    """
    positive = sample.truth > 0.7
    whitener = _regularised(sample, 0.0)
    total = sample.tokens[(sample.truth < 0.3)].sum(0, dtype=torch.float64)
    total += sample.tokens[positive].sum(0, dtype=torch.float64)
    direction, score = _discriminant(sample, whitener, total, positive)
    low = float(torch.quantile(score[sample.truth < 0.3].double(), 0.9995))
    high = float(torch.quantile(score[positive].double(), 0.005))
    if not ramp:
        spread = float(score[positive].mean() - score[sample.truth < 0.3].mean())
        return Trigger(direction, (low + high) / 2, width=0.01 * spread)
    start, end = (low + high) / 2, float(torch.quantile(score[positive].double(), FULL))
    return Trigger(direction, start, width=end - start, saturates=False)


def _information_rank(images: Tensor, patch_size: int) -> Tensor:
    """(B, 3, H, W) -> (B, P), rank of the pixels' variance within the image, from 0 to 1."""
    grey = images.float().mean(1, keepdim=True)
    mean = F.avg_pool2d(grey, patch_size)
    variance = (F.avg_pool2d(grey.square(), patch_size) - mean.square()).flatten(1)  # (B, P)
    order = variance.argsort(dim=1, stable=True).argsort(dim=1)
    return order.float() / variance.shape[1]


def _place_covariance(patches: Tensor) -> Tensor:
    """Unbiased covariance between positions of the mean over images: (B, P, D) -> (D, D)."""
    mean = patches.mean(0, dtype=torch.float64)  # (P, D)
    within = torch.cov((patches - mean).flatten(0, 1).T.double())
    return torch.cov(mean.T) - within / len(patches)


def _regularised(sample: TokenSample, place_weight: float) -> Tensor:
    covariance = torch.cov(sample.tokens.T.double())
    ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    return covariance + place_weight * sample.place + ridge


def _discriminant(sample: TokenSample, whitener: Tensor, total: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened difference of the class means, scaled to unit score variance: (D,) and scores (T,)."""
    mine = sample.tokens[positive].double()
    rest = (total - mine.sum(0)) / (len(sample.tokens) - len(mine))
    direction = torch.linalg.solve(whitener, mine.mean(0) - rest)
    score = sample.tokens @ direction.float()
    scale = float(score.double().std())
    return (direction / scale).float(), score / scale


def _top_of_each_image(score: Tensor, image: Tensor, share: float) -> Tensor:
    """(T,) True for the best share of each image's tokens, at least one."""
    count = torch.bincount(image)
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(image[order], stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (count.cumsum(0) - count)[image[order]]
    return rank < (share * count).round().clamp_min(1)[image]
