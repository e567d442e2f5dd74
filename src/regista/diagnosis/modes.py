"""Is there a second mode: a group of large values that the tail of the bulk does not explain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, betainc, gammaln

MOST = 0.3
DEPTH = 0.25
RISE = 0.01
CLEAR = 0.5
DENSE_RANKS = 48
ATTEMPTS = 200
NARROWEST = 0.05
TAIL = 12


@dataclass(frozen=True)
class SecondMode:
    """A valley and the group of values above it.

    Attributes:
        threshold: Middle of the widest empty stretch of the valley, in the units of the values.
        count: Values above it.
        inside: Values within the valley.
        evidence: -log10 of the product of two tail probabilities; see ``second_modes``.
    """

    threshold: float
    count: int
    inside: int
    evidence: float


def second_mode(values: np.ndarray, *, least: float) -> SecondMode | None:
    """The most likely second mode of ``second_modes``, or None."""
    return next(iter(second_modes(values, least=least)), None)


def second_modes(values: np.ndarray, *, least: float, comparisons: int = 1) -> list[SecondMode]:
    """Find valleys above the median that separate a second mode, the most likely first.

    The tail of one mode thins out: below k larger values, the number j of values in a window
    follows a negative binomial law with p = exp(-width / scale), where the scale is the mean
    normalised spacing of the values below the window (Hill's estimate; Rényi's spacings). That
    holds for a Pareto tail on a log axis and is cautious for every lighter one; two axes are
    used, log(value / median) and log(1 + excess over the median / spread of the bulk), because
    a heavy tail may also start from an offset. A valley must be too empty for both laws
    together, emptier than a window of its width above it, and, from a dozen values on, the
    density must rise again beyond what chance gives to a falling one.

    Args:
        values: One-dimensional, log(value / median): any scale, finite.
        least: The median of the second mode lies at least this far above 0.
        comparisons: How many sets of values are looked at for one answer; see ``evidence_needed``.
    """
    half = values.size // 2
    if half < 5:
        return []
    upper = np.partition(values, values.size - half)[values.size - half :]
    x: np.ndarray = np.maximum(np.sort(upper)[::-1], 0.0)  # it falls; a bulk of equal values stays in it
    if x.max() < least:
        return []
    count, inside, evidence = _too_empty(x, values.size, least, comparisons)
    found: list[SecondMode] = []
    spans: list[tuple[int, int]] = []
    for index in np.argsort(-evidence, kind="stable")[:ATTEMPTS]:
        k, j = int(count[index]), int(inside[index])
        if any(k <= last and first <= k + j for first, last in spans) or not _rises_again(x, k, j):
            continue
        spans.append((k, k + j))
        rank = k + int(np.argmax(x[k - 1 : k + j] - x[k : k + j + 1]))
        found.append(SecondMode(float(x[rank - 1] + x[rank]) / 2, rank, j, float(evidence[index])))
    if found:  # of clear ones the lowest: the second mode may itself have groups
        first = min((m for m in found if m.evidence >= CLEAR * found[0].evidence), key=lambda m: m.threshold)
        found.sort(key=lambda m: m is not first)
    return found


def evidence_needed(count: np.ndarray, total: int, comparisons: int = 1) -> np.ndarray:
    """Least evidence for ``count`` of ``total`` values.

    Set on single-mode families from Gaussian to Cauchy such that about 0.4 % of samples raise
    an alarm; a small sample gets some credit, since a bulk of thirty values cannot show that
    its tail is light. The first logarithm pays for the number of windows tried, the second
    for the sets of values looked at (Bonferroni): one in twelve blocks stands out by chance more
    often than one alone.
    """
    needed: np.ndarray = np.clip(3.5 + 0.75 * np.log2(total / 30), 3.5, 5.5) + np.log2(count) + np.log10(comparisons)
    return needed


def _too_empty(x: np.ndarray, total: int, least: float, comparisons: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows (values above, values inside, evidence) with enough evidence; x falls from the top."""
    ranks = _ranks(x[: min(len(x) - 3, int(MOST * total) + 2)])
    first, last = (ranks[index] for index in np.triu_indices(len(ranks)))
    usable = (last - first <= DEPTH * first) & (x[(first - 1) // 2] >= least) & (x[first - 1] - x[last] > NARROWEST)
    k, rank = first[usable], last[usable]
    j = rank - k
    below = np.minimum(np.maximum(TAIL, 2 * rank), len(x) - 1 - rank)
    excess = np.expm1(x)
    from_offset = np.log1p(excess / max(float(np.median(excess)), 0.03))
    evidence = np.zeros(len(k))
    for axis, smallest in ((x, 0.01), (from_offset, 0.05)):
        scale = np.maximum(_mean_spacing(axis, rank, below), smallest)
        width = (axis[k - 1] - axis[rank]) / scale
        width = below * np.log1p(k * width / below) / k  # the scale itself is an estimate from few values
        evidence -= _log10_cdf(j, k, width)
    enough = evidence >= evidence_needed(k, total, comparisons)
    return k[enough], j[enough], evidence[enough]


def _ranks(x: np.ndarray) -> np.ndarray:
    """Where a window may end: the first ranks, then ever sparser ones, and the widest gaps."""
    every = np.arange(1, len(x))
    sparse = (DENSE_RANKS * 1.08 ** np.arange(1, 200)).astype(int)
    gaps = (x[:-1] - x[1:]) * every**0.5
    widest = np.argpartition(gaps, max(len(gaps) - 20, 0))[-20:] + 1 if len(gaps) else every
    ranks: np.ndarray = np.unique(np.concatenate([every[:DENSE_RANKS], sparse[sparse < len(x)], widest]))
    return ranks


def _mean_spacing(y: np.ndarray, rank: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Mean of i * (y_i - y_{i+1}) over the ``count`` ranks after ``rank``; y falls."""
    summed = np.concatenate([[0.0], np.cumsum(y)])
    end = rank + count
    spacing: np.ndarray = (summed[end] - summed[rank] + rank * y[rank] - end * y[end]) / np.maximum(count, 1)
    return spacing


def _log10_cdf(j: np.ndarray, k: np.ndarray, width: np.ndarray) -> np.ndarray:
    """log10 of P(at most j values in a window below k larger ones) when the tail is exp(-width)."""
    probability = betainc(k, j + 1, np.exp(-width))
    leading = gammaln(k + j + 1) - gammaln(k + 1) - gammaln(j + 1) - k * width
    logarithm: np.ndarray = np.where(
        probability > 1e-280, np.log10(np.maximum(probability, 1e-300)), leading / np.log(10)
    )
    return logarithm


def _rises_again(x: np.ndarray, k: int, j: int) -> bool:
    """Is it denser above the valley than a density that only falls would be?"""
    above = x[:k][::-1]
    width = float(x[k - 1] - x[k + j])
    rival = int((np.searchsorted(above, above + width, side="right") - np.arange(k)).max())
    if j > DEPTH * rival:
        return False
    if k < TAIL:
        return True
    up_to = np.unique(np.linspace(1, k, 64).astype(int))
    reach = above[up_to - 1] - above.min()
    return float(bdtr(j, j + up_to, width / (width + reach)).min()) < RISE
