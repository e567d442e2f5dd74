"""Is there a second mode: a group of large values that the tail of the bulk does not explain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import nbinom

BINS = 160
SIGNIFICANCE = 1e-5
DEPTH = 0.25
MOST = 0.3
WIDTH = 0.25


@dataclass(frozen=True)
class SecondMode:
    """Where the valley lies, in the units of the values.

    Attributes:
        threshold: Middle of the valley.
        low, high: Its edges.
        probability: Of a valley as empty, if the bulk's tail simply went on.
        count: Values above the valley.
    """

    threshold: float
    low: float
    high: float
    probability: float
    count: int


def second_mode(values: np.ndarray, *, least: float) -> SecondMode | None:
    """Find the emptiest valley above the median that separates a second mode.

    A tail that goes on thins out: the number j of values in a window below k larger ones
    follows a negative binomial law with p = exp(-width / scale), where the scale is that of
    an exponential tail (exact for Pareto norms on a log axis, an overestimate for lighter
    tails), measured on the values below the window. A valley must be too empty for that, and
    emptier than a window of the same width above it.

    Args:
        values: One-dimensional, finite; logarithms for scale-free data.
        least: The median of the second mode lies at least this far above the overall median.

    Returns:
        The most significant valley, or None.
    """
    centre = float(np.median(values))
    top = float(values.max())
    if not top > centre + least:
        return None
    tail = np.sort(values[values > centre])
    edges = np.linspace(centre, top, BINS + 1)
    above = len(tail) - np.searchsorted(tail, edges, side="right")  # values beyond each edge
    best: SecondMode | None = None
    for low in range(1, BINS):
        limit = SIGNIFICANCE if best is None else best.probability
        best = _best_window(values.size, tail, edges, above, low, centre + least, limit) or best
    return best


def _best_window(
    total: int, tail: np.ndarray, edges: np.ndarray, above: np.ndarray, low: int, least: float, limit: float
) -> SecondMode | None:
    """The least probable deep valley that starts at one edge, if below ``limit``."""
    below = tail[: len(tail) - above[low]]
    if len(below) < 4:
        return None
    highs = np.arange(low + 1, len(edges))
    counts = above[highs]
    inside = above[low] - counts
    width = edges[highs] - edges[low]
    medians = tail[np.minimum(len(tail) - 1, len(tail) - (counts + 1) // 2)]
    usable = (counts > 0) & (counts <= MOST * total) & (medians >= least)
    usable &= (inside <= DEPTH * counts) & (width >= WIDTH)
    counts, inside, width = (x[usable] for x in (counts, inside, width))
    probability = nbinom.cdf(inside, counts, np.exp(-width / _tail_scale(below, counts, edges[low])))
    for index in np.argsort(probability, kind="stable"):
        if probability[index] >= limit:
            return None
        upper = tail[len(tail) - counts[index] :]
        if inside[index] <= DEPTH * _densest(upper, float(width[index])):
            low_edge, high_edge = float(edges[low]), float(upper.min())
            middle = (low_edge + high_edge) / 2
            return SecondMode(middle, low_edge, high_edge, float(probability[index]), int(counts[index]))
    return None


def _densest(values: np.ndarray, width: float) -> int:
    """Most of the sorted values that one window of this width holds."""
    return int((np.searchsorted(values, values + width, side="right") - np.arange(len(values))).max())


def _tail_scale(below: np.ndarray, counts: np.ndarray, edge: float) -> np.ndarray:
    """Scale of the tail under ``edge``: the larger of the upper fifth's mean excess and a local estimate."""
    upper = below[int(0.6 * len(below)) :]  # of the half above the median: the upper fifth of all
    mean_excess = float((upper - upper.min()).mean())
    unsure = 1 + len(upper) ** -0.5  # few values know their scale badly
    reach = np.minimum(len(below), np.maximum(8, 3 * counts))
    local = (edge - below[len(below) - reach]) / np.log1p(reach / np.maximum(counts, 1))
    scale: np.ndarray = np.maximum(np.maximum(mean_excess * unsure, local), 1e-9)
    return scale
