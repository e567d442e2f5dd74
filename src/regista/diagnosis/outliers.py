"""Outlier tokens: patch tokens whose norms form a second mode, apart in space as well.

Darcet et al. (2309.16588, section 2.1) pick a cutoff by hand in a bimodal histogram. Here the
valley is looked for, and a model without one is clean: no constant, no percentile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regista.diagnosis.modes import second_modes
from regista.diagnosis.patterns import why_pattern

LEAST_RATIO = 1.5
MANY = 0.10
REPEATED = 0.6  # of the cells that as many outliers in random cells would touch


@dataclass(frozen=True)
class Outliers:
    """Which patch tokens are outliers; unpacks as (cutoff, mask, share).

    Attributes:
        cutoff: Norm between the modes; None if there is no second mode. Where the images
            differ in scale it holds for an image of middling norms.
        mask: (n, rows, cols) bool.
        share: Of all valid patch tokens, 0 to 1.
        ratio: Median of the outliers over the median of the rest, each in the median of its image; or None.
        note: Why nothing was found, or a caution such as more than a tenth flagged.
    """

    cutoff: float | None
    mask: Tensor
    share: float
    ratio: float | None = None
    note: str = ""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.cutoff, self.mask, self.share))


def find_outliers(
    norms: Tensor, *, cutoff: float | None = None, valid: Tensor | None = None, comparisons: int = 1
) -> Outliers:
    """Find tokens of outlier norm.

    A second mode at 1.5 times the median or more is wanted, with a valley before it that the
    bulk's tail does not explain (see ``second_modes``). Every image is measured in its own
    median. Single tokens and small groups that stand out from their neighbours count;
    gradients, whole rows or columns, and large regions do not (see ``why_pattern``). Values
    that repeat in the same cells of many images count once.

    Args:
        norms: (n, rows, cols), before the final norm, not negative.
        cutoff: Use this norm instead of looking for a valley.
        valid: (n, rows, cols) bool, False for padded cells, which are left out.
        comparisons: How many maps are looked at for one verdict, such as the blocks of a model; the
            more, the more evidence each must give.

    Raises:
        ValueError: for another shape, negative norms, or NaN and infinite ones (naming the image).
    """
    values, usable = _checked(norms, valid)
    if not usable.any():
        return _clean(norms, "no valid patch")
    if cutoff is not None:
        return _result(values, usable, (values > cutoff) & usable, cutoff)
    mask, threshold, note = high_tokens(log_ratio(values, usable), usable, LEAST_RATIO, comparisons)
    if threshold is None:
        return _clean(norms, note)
    return _result(values, usable, mask, _norm_between(values, usable, mask, threshold))


def high_tokens(
    relative: np.ndarray, usable: np.ndarray, least_ratio: float, comparisons: int = 1
) -> tuple[np.ndarray, float | None, str]:
    """Tokens of a second mode that are no pattern of the field: mask, threshold in ``relative``, or why there are none.

    Args:
        relative: (n, rows, cols), of ``log_ratio``.
        usable: bool, cells that count.
        least_ratio: The median of the second mode over the median, at least.
        comparisons: As in ``find_outliers``.
    """
    least = float(np.log(least_ratio))
    note = "no second mode"
    for mode in second_modes(relative[usable], least=least, comparisons=comparisons):
        mask: np.ndarray = (relative > mode.threshold) & usable
        note = why_pattern(relative, mask, usable) or _why_repeated(relative, mask, usable, least)
        if not note:
            return mask, mode.threshold, ""
    return np.zeros(relative.shape, bool), None, note


def log_ratio(values: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """log(value / median of its image's usable cells): (n, rows, cols) -> (n, rows, cols)."""
    if usable.all():
        medians = np.median(values.reshape(len(values), -1), axis=1)
    else:
        pairs = zip(values, usable, strict=True)
        medians = np.array([np.median(image[ok]) if ok.any() else 1.0 for image, ok in pairs])
    floor = max(float(values[usable].max()), 1e-300) * 1e-9
    ratio: np.ndarray = np.log(np.maximum(values, floor)) - np.log(np.maximum(medians, floor))[:, None, None]
    return ratio


def _why_repeated(relative: np.ndarray, mask: np.ndarray, usable: np.ndarray, least: float) -> str:
    """Does the mode survive when every cell counts once? What repeats in all images is one observation."""
    cells: np.ndarray = np.logical_or.reduce(mask)
    shares = mask.sum((1, 2)) / np.maximum(usable.sum((1, 2)), 1)
    if cells.mean() >= REPEATED * (1 - np.prod(1 - shares)):
        return ""
    ordered = np.sort(np.where(usable, relative, np.nan), axis=0)  # NaN last
    count = usable.sum(0)
    some = count > 0
    row, col = np.nonzero(some)
    level = np.modf((np.arange(some.sum()) + 0.5) * 0.6180339887498949)[0]  # evenly spread over [0, 1)
    for share in (level, np.full_like(level, 0.5)):
        drawn = ordered[(share * count[some]).astype(int), row, col]  # one value a cell, whatever the order of images
        drawn = drawn - np.median(drawn)
        for mode in second_modes(drawn, least=least):
            high = drawn > mode.threshold
            if 2 * cells[row, col][high].sum() > high.sum():
                return ""
    return "high norms repeat in a few cells whose norms are no second mode"


def _norm_between(values: np.ndarray, usable: np.ndarray, mask: np.ndarray, threshold: float) -> float:
    high, low = float(values[mask].min()), float(values[usable & ~mask].max())
    return (high * low) ** 0.5 if high > low else float(np.exp(threshold) * np.median(values[usable]))


def _checked(norms: Tensor, valid: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    if norms.ndim != 3:
        raise ValueError(f"norms are (n, rows, cols), got {tuple(norms.shape)}")
    if valid is not None and valid.shape != norms.shape:
        raise ValueError(f"valid cells are {tuple(norms.shape)} like the norms, got {tuple(valid.shape)}")
    values: np.ndarray = norms.detach().cpu().double().numpy()
    usable = np.ones(values.shape, bool) if valid is None else valid.cpu().numpy().astype(bool)
    bad = (~np.isfinite(values) & usable).any((1, 2))
    if bad.any():
        raise ValueError(f"NaN or infinite norms in image {int(bad.argmax())}")
    if (values[usable] < 0).any():
        raise ValueError("negative norms: find_outliers takes L2 norms of patch tokens, (n, rows, cols)")
    return np.where(usable, values, 0.0), usable


def _clean(norms: Tensor, note: str) -> Outliers:
    return Outliers(None, torch.zeros(norms.shape, dtype=torch.bool), 0.0, None, note)


def _result(values: np.ndarray, usable: np.ndarray, mask: np.ndarray, cutoff: float) -> Outliers:
    share = float(mask.sum() / usable.sum())
    rest = usable & ~mask
    ratio = None
    if mask.any() and rest.any() and np.median(values[rest]) > 0:
        relative = np.exp(log_ratio(values, usable))
        ratio = float(np.median(relative[mask]) / np.median(relative[rest]))
    note = f"{share:.0%} of the patches are flagged, more than a tenth: look at the maps" if share > MANY else ""
    return Outliers(cutoff, torch.from_numpy(mask), share, ratio, note)
