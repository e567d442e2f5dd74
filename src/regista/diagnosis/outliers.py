"""Outlier tokens: patch tokens whose norms form a second mode, apart in space as well.

Darcet et al. (2309.16588, section 2.1) pick a cutoff by hand in a bimodal histogram. Here the
valley is looked for, and a model without one is clean: no constant, no percentile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from regista.diagnosis.modes import second_mode

LEAST_RATIO = 1.5
CONTRAST = 0.5
LINE = 0.8
MANY = 0.10
REGION = 0.2
MOSTLY = 0.5


class Outliers(NamedTuple):
    """Which patch tokens are outliers.

    Attributes:
        cutoff: Norm between the modes; None if there is no second mode.
        mask: (n, rows, cols) bool.
        share: Of all valid patch tokens, 0 to 1.
        ratio: Median of the outliers over the median of the rest, or None.
        note: Why nothing was found, or a caution such as more than a tenth flagged.
    """

    cutoff: float | None
    mask: Tensor
    share: float
    ratio: float | None = None
    note: str = ""


def find_outliers(norms: Tensor, *, cutoff: float | None = None, valid: Tensor | None = None) -> Outliers:
    """Find tokens of outlier norm.

    A second mode at 1.5 times the median or more is wanted, with a valley before it that the
    bulk's tail does not explain (see ``second_mode``). Every image is measured in its own
    median. Single tokens and small groups that stand out from their neighbours count;
    gradients, whole rows or columns, and one large region do not.

    Args:
        norms: (n, rows, cols), before the final norm, positive.
        cutoff: Use this norm instead of looking for a valley.
        valid: (n, rows, cols) bool, False for padded cells, which are left out.

    Raises:
        ValueError: for another shape, negative norms, or NaN and infinite ones (naming the image).
    """
    values = _checked(norms)
    usable = np.ones(values.shape, bool) if valid is None else valid.cpu().numpy().astype(bool)
    if not usable.any():
        return _clean(norms, "no valid patch")
    if cutoff is not None:
        return _result(values, usable, (values > cutoff) & usable, cutoff)
    medians = np.array([np.median(image[ok]) if ok.any() else 1.0 for image, ok in zip(values, usable, strict=True)])
    floor = max(float(medians.max()), 1e-30) * 1e-6
    relative = np.log(np.maximum(values, floor) / np.maximum(medians, floor)[:, None, None])
    mode = second_mode(relative[usable], least=np.log(LEAST_RATIO))
    if mode is None:
        return _clean(norms, "no second mode")
    mask = (relative > mode.threshold) & usable
    reason = _not_tokens(relative, mask, usable, float(np.median(relative[mask])))
    if reason:
        return _clean(norms, reason)
    apart = values[mask].min() > values[usable & ~mask].max()
    edge = np.sqrt(values[mask].min() * values[usable & ~mask].max())
    found = float(edge) if apart else float(np.exp(mode.threshold) * np.median(values[usable]))
    return _result(values, usable, mask, found)


def _not_tokens(relative: np.ndarray, mask: np.ndarray, usable: np.ndarray, height: float) -> str:
    """Why a group of high values is a pattern of the field and not of single tokens, or ""."""
    if _contrast(relative, mask, usable) < CONTRAST * height:
        return "the high norms rise gradually from their neighbours"
    if _in_lines(mask, usable) > MOSTLY:
        return "the high norms fill whole rows or columns"
    largest = max((ndimage.sum_labels(image, *_components(image)).max() for image in mask if image.any()), default=0.0)
    if largest > REGION * mask[0].size and largest > MOSTLY * mask.sum() / len(mask) and largest > 4:
        return "the high norms are one large region"
    return ""


def _components(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels, count = ndimage.label(image)  # neighbours by sides
    return labels, np.arange(1, count + 1)


def _contrast(relative: np.ndarray, mask: np.ndarray, usable: np.ndarray) -> float:
    """Median step between a flagged cell and an unflagged neighbour by side; inf if there is no such pair."""
    steps = []
    for axis in (1, 2):
        here, there = (slice(None, -1), slice(1, None))
        pair = [np.moveaxis(x, axis, 0) for x in (relative, mask, usable)]
        height, flagged, ok = pair
        border = (flagged[here] != flagged[there]) & ok[here] & ok[there]
        steps.append(np.abs(height[here] - height[there])[border])
    joined = np.concatenate(steps)
    return float(np.median(joined)) if joined.size else float("inf")


def _in_lines(mask: np.ndarray, usable: np.ndarray) -> float:
    """Share of flagged cells that lie in rows or columns flagged over almost their whole length."""
    inside = np.zeros_like(mask)
    for axis in (1, 2):
        if mask.shape[axis] < 4:
            continue
        length = usable.sum(axis, keepdims=True)
        filled = mask.sum(axis, keepdims=True)
        inside |= (filled >= LINE * length) & (length > 0)
    return float((inside & mask).sum() / max(1, mask.sum()))


def _checked(norms: Tensor) -> np.ndarray:
    if norms.ndim != 3:
        raise ValueError(f"norms are (n, rows, cols), got {tuple(norms.shape)}")
    values: np.ndarray = norms.detach().cpu().double().numpy()
    bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
    if bad.any():
        raise ValueError(f"NaN or infinite norms in image {int(bad.argmax())}")
    if (values < 0).any():
        raise ValueError("norms are not negative; these are no norms")
    return values


def _clean(norms: Tensor, note: str) -> Outliers:
    return Outliers(None, torch.zeros(norms.shape, dtype=torch.bool), 0.0, None, note)


def _result(values: np.ndarray, usable: np.ndarray, mask: np.ndarray, cutoff: float) -> Outliers:
    share = float(mask.sum() / usable.sum())
    rest = usable & ~mask
    ratio = float(np.median(values[mask]) / np.median(values[rest])) if mask.any() and rest.any() else None
    note = f"{share:.0%} of the patches are flagged, more than a tenth: look at the maps" if share > MANY else ""
    return Outliers(cutoff, torch.from_numpy(mask), share, ratio, note)
