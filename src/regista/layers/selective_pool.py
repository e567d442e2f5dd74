"""Selective pooling of patch tokens: per channel, the mean of the K patches that a low-pass filter changes least.

LAST-ViT, "Vision Transformers Need More Than Registers" (arXiv 2602.22394), section 4 and equation 5.
The filter runs along the channels, not along the patches, so the order of the channels matters.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.layers.channel_filter import at_least_float32, low_pass

Variant = Literal["paper", "released"]
VARIANTS = ("paper", "released")


class PooledVotes(NamedTuple):
    """A pooled vector and where it comes from.

    Attributes:
        pooled: (B, D), as ``SelectivePool`` returns it.
        votes: (B, P) int64, in how many channels a patch was picked; their sum is K * D.
    """

    pooled: Tensor
    votes: Tensor


class SelectivePool(nn.Module):
    """Pools patch tokens (B, P, D) to (B, D); no parameters, nothing to train.

    For each channel the K patches of the highest score (``stability_scores``) are picked and
    their original values averaged. Works in float32 at least and returns the dtype of the input.
    The scores carry no gradient; it flows through the picked values alone, each with weight 1 / K.
    Of patches with equal scores the first is picked; while a graph is exported or compiled, which
    of them is left to torch, and NaN is not looked for.

    Args:
        k: Patches picked per channel: a count, or a share of the patches in (0, 1] (a float; the
            count is rounded, at least 1). The released code trains with 1; the paper's
            ablation is best with a quarter to a half of 196 (text) and 7 of 49 (labels).
            All patches give the patch mean.
        variant: Which score, see ``stability_scores``.
        eps: Keeps the score of a token that the filter does not change finite.

    Raises:
        ValueError: for a setting out of range, and in a call for tokens that are not a finite
            (B, P, D) float tensor, or fewer patches than ``k``.
    """

    def __init__(self, k: int | float, variant: Variant = "paper", eps: float = 1e-6) -> None:
        super().__init__()
        whole = isinstance(k, int) and not isinstance(k, bool) and k >= 1
        if not whole and not (isinstance(k, float) and 0 < k <= 1):
            raise ValueError(f"k must be a count of patches >= 1 or a share (a float) in (0, 1], got {k!r}")
        _check_score_options(variant, eps)
        self.k = k
        self.variant: Variant = variant
        self.eps = eps

    def forward(self, patches: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, P, D) -> (B, D).

        Args:
            patches: Patch tokens alone, after the final norm.
            valid: (B, P) bool, False for padded cells: they are never picked, and a share ``k``
                counts the valid ones of each image.
        """
        _check_tokens(patches, valid)
        if valid is not None:
            return torch.stack([self._pool(tokens)[0].squeeze(0) for tokens, _ in _valid_tokens(patches, valid)])
        return self._pool(patches)[0]

    def pool_with_votes(self, patches: Tensor, valid: Tensor | None = None) -> PooledVotes:
        """What ``forward`` returns, with the (B, P) number of channels that picked each patch."""
        _check_tokens(patches, valid)
        if valid is None:
            pooled, picked = self._pool(patches)
            return PooledVotes(pooled, _count_votes(picked, patches))
        votes = torch.zeros(valid.shape, dtype=torch.int64, device=patches.device)
        rows = []
        for image, (tokens, cells) in enumerate(_valid_tokens(patches, valid)):
            pooled, picked = self._pool(tokens)
            rows.append(pooled.squeeze(0))
            votes[image, cells] = _count_votes(picked, tokens).squeeze(0)
        return PooledVotes(torch.stack(rows), votes)

    def votes(self, patches: Tensor, valid: Tensor | None = None) -> Tensor:
        """In how many channels each patch was picked: (B, P, D) -> (B, P) int64, sum K * D an image."""
        return self.pool_with_votes(patches.detach(), valid).votes

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"k={self.k}, variant={self.variant!r}, eps={self.eps}"

    def _pool(self, patches: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pooled (B, D) and the picked patches (B, K, D), None for all of them."""
        count = self._count(patches.shape[1])
        values = at_least_float32(patches)
        if count == patches.shape[1]:
            pooled = values.mean(1)
            _check_finite(pooled, patches)
            return pooled.to(patches.dtype), None
        scores = stability_scores(values, self.variant, self.eps)
        picked = _highest(scores, count, patches)  # (B, K, D)
        return values.gather(1, picked).mean(1).to(patches.dtype), picked

    def _count(self, patches: int) -> int:
        count = self.k if isinstance(self.k, int) else max(1, round(self.k * patches))
        if count > patches:
            raise ValueError(f"k = {count} of {patches} patches; take a smaller k or a share such as 0.5")
        return count


@torch.no_grad()
def stability_scores(patches: Tensor, variant: Variant = "paper", eps: float = 1e-6) -> Tensor:
    """How little the low-pass filter changes each value, times its sign: (B, P, D) -> (B, P, D), no gradient.

    With Y = ``low_pass(X)``:

    - "paper": equation 5, Y / (|Y - X| + eps).
    - "released": the training configuration and the README, X / |Y - X|, with the floor
      max(|Y - X|, eps) of the released evaluation script (0: none, as in training).

    As eps goes to 0 the first is the second plus the sign of Y - X, so they rank nearly alike.
    A third formula of that script, Y / (Y - X + eps) without the absolute value, ranks quite
    differently and is not offered.

    Both scores carry the sign of the value: positive values win, and in a channel that is
    negative everywhere the least stable patch does.

    Raises:
        ValueError: for an unknown variant, or an eps that is negative or not finite.
    """
    _check_score_options(variant, eps)
    values = at_least_float32(patches)
    low = low_pass(values)
    distance = (low - values).abs_()
    if variant == "paper":
        return low.div_(distance.add_(eps))
    return torch.div(values, distance.clamp_(min=eps), out=low)


def patch_scores(patches: Tensor, pooled: Tensor) -> Tensor:
    """Patch Score: cosine of each patch token and the global vector, (B, P, D), (B, D) -> (B, P).

    LAST-ViT, equation 3; the global vector is the CLS token, a mean, or the pooled vector of
    ``SelectivePool``. In [-1, 1], float32 at least; a zero token has score 0.

    Raises:
        ValueError: if the shapes do not fit, or a value is NaN or infinite.
    """
    _check_tokens(patches, None)
    if pooled.shape != (patches.shape[0], patches.shape[2]):
        wanted = (patches.shape[0], patches.shape[2])
        raise ValueError(
            f"pooled must be (B, D) = {wanted} for patches {tuple(patches.shape)}, got {tuple(pooled.shape)}"
        )
    if not pooled.isfinite().all():
        raise ValueError("the pooled vector is NaN or infinite; check the model's weights")
    tokens = F.normalize(at_least_float32(patches), dim=-1)
    target = F.normalize(at_least_float32(pooled), dim=-1).to(tokens.dtype)
    scores = (tokens @ target.unsqueeze(-1)).squeeze(-1)  # (B, P)
    _check_finite(scores, patches)
    return scores.clamp(-1, 1)


def _highest(scores: Tensor, count: int, patches: Tensor) -> Tensor:
    """Patches with the ``count`` highest scores in each channel: (B, P, D) -> (B, count, D)."""
    if count == 1:
        best, picked = scores.max(1, keepdim=True)  # the first of equals
        _check_finite(best, patches, ignore_infinite=True)
        return picked
    best, picked = scores.topk(count, dim=1, sorted=False)
    _check_finite(best, patches, ignore_infinite=True)
    if not torch.compiler.is_compiling() and torch.count_nonzero(scores >= best.amin(1, keepdim=True)) > best.numel():
        order: Tensor = scores.sort(dim=1, descending=True, stable=True).indices  # equals at the bar
        return order[:, :count]
    return picked


def _count_votes(picked: Tensor | None, patches: Tensor) -> Tensor:
    batch, cells, width = patches.shape
    if picked is None:
        return torch.full((batch, cells), width, dtype=torch.int64, device=patches.device)
    votes = torch.zeros((batch, cells), dtype=torch.int64, device=patches.device)
    indices = picked.flatten(1)  # (B, K * D)
    return votes.scatter_add_(1, indices, torch.ones_like(indices))


def _valid_tokens(patches: Tensor, valid: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each image its valid tokens (1, P', D) and their places (P',)."""
    places = [cells.nonzero().squeeze(1) for cells in valid]
    return [(tokens[where].unsqueeze(0), where) for tokens, where in zip(patches.unbind(0), places, strict=True)]


def _check_score_options(variant: str, eps: float) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be >= 0 and finite, got {eps}; the default is 1e-6")


def _check_tokens(patches: Tensor, valid: Tensor | None) -> None:
    if patches.ndim != 3 or 0 in patches.shape or not patches.is_floating_point():
        got = f"{tuple(patches.shape)} {patches.dtype}"
        raise ValueError(f"patches must be a float tensor (B, P, D) with P and D >= 1, got {got}")
    if valid is None:
        return
    if valid.shape != patches.shape[:2] or valid.dtype != torch.bool:
        wanted = tuple(patches.shape[:2])
        raise ValueError(f"valid must be a bool tensor (B, P) = {wanted}, got {tuple(valid.shape)} {valid.dtype}")
    empty = (~valid.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"images {empty} have no valid patch; leave them out")


def _check_finite(result: Tensor, patches: Tensor, *, ignore_infinite: bool = False) -> None:
    """NaN and infinity of an input reach the result, which is smaller to look at."""
    if torch.compiler.is_compiling() or not bool((result.isnan() if ignore_infinite else ~result.isfinite()).any()):
        return
    images = (~patches.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    if images:
        raise ValueError(f"patch tokens of images {images} of the batch are NaN or infinite; check the model's weights")
    raise ValueError("scores are NaN though the tokens are finite: zero tokens need eps > 0, huge ones a scale")
