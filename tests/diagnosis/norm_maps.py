"""Seeded synthetic norm maps: healthy ones of many shapes, and sick ones with their truth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.ndimage import gaussian_filter

SIZES = ((1, 16, 16), (1, 37, 37), (8, 37, 37), (32, 16, 16), (4, 14, 10))


def healthy(seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, (n, rows, cols)) maps without outlier tokens."""
    rng = np.random.default_rng(seed)
    for shape in SIZES:
        n, rows, cols = shape
        noise = rng.standard_normal(shape)
        yield f"normal {shape}", 40 + 4 * noise
        yield f"narrow normal {shape}", 40 + 0.4 * noise
        yield f"log-normal 0.3 {shape}", 40 * np.exp(0.3 * noise)
        yield f"log-normal 0.8 {shape}", 40 * np.exp(0.8 * noise)
        yield f"gamma {shape}", 10 + 10 * rng.gamma(2, 1, shape)
        yield f"exponential {shape}", 20 + 10 * rng.exponential(1, shape)
        yield f"student {shape}", 40 + 4 * np.abs(rng.standard_t(3, shape))
        yield f"pareto {shape}", 10 * (1 + rng.pareto(2.5, shape))
        yield f"uniform {shape}", rng.uniform(20, 100, shape)
        yield f"constant {shape}", np.full(shape, 7.0)
        yield f"unlike scales {shape}", (40 + 4 * noise) * np.geomspace(1, 20, n)[:, None, None]
        rows_at, cols_at = np.mgrid[0:rows, 0:cols]
        ramp = 20 + 180 * (rows_at / rows + cols_at / cols) / 2
        yield f"ramp {shape}", ramp * np.exp(0.03 * noise)
        bump = np.exp(-((rows_at - rows / 3) ** 2 + (cols_at - cols / 2) ** 2) / (2 * (min(rows, cols) / 6) ** 2))
        yield f"bump {shape}", 40 * (1 + 4 * bump) * np.exp(0.03 * noise)
        yield (
            f"wave {shape}",
            60 * np.exp(0.7 * np.sin(rows_at / rows * 12) * np.cos(cols_at / cols * 9) + 0.05 * noise),
        )
        field = gaussian_filter(noise, (0, 2, 2))
        yield f"smooth field {shape}", 60 * np.exp(0.5 * field / field.std())
        for height in (1.3, 3.0):
            stripe = np.ones((rows, cols))
            stripe[rows // 2 : rows // 2 + max(1, round(0.07 * rows))] = height
            yield f"stripe x{height} {shape}", 40 * stripe * np.exp(0.05 * noise)
            stripes = np.ones((rows, cols))
            stripes[:, ::5] = height
            yield f"stripes x{height} {shape}", 40 * stripes * np.exp(0.05 * noise)
        halves = np.where(cols_at < cols / 2, 30.0, 75.0)
        yield f"two halves {shape}", halves * np.exp(0.05 * noise)
        halves = np.where(rows_at < 0.07 * rows, 75.0, 30.0)
        yield f"top band {shape}", halves * np.exp(0.02 * noise)
        border = np.minimum(np.minimum(rows_at, rows - 1 - rows_at), np.minimum(cols_at, cols - 1 - cols_at)) == 0
        yield f"frame {shape}", np.where(border, 90.0, 40.0) * np.exp(0.05 * noise)


def sick(seed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, (n, rows, cols) maps, truth) with 0.5 to 15 % of the tokens at 3.2 times the median or more."""
    rng = np.random.default_rng(seed)
    for shape in SIZES:
        n, rows, cols = shape
        for share in (0.005, 0.01, 0.03, 0.08, 0.15):
            for low, high in ((3.2, 3.6), (3.2, 8.0), (5.0, 30.0)):
                bulk = 40 * np.exp(rng.choice([0.05, 0.12]) * rng.standard_normal(shape))
                count = max(2 if n == 1 else 1, round(share * rows * cols))
                for kind in ("moving", "fixed", "clumped"):
                    truth = np.zeros(shape, bool)
                    for image in truth:
                        cells = rng.permutation(rows * cols)[:count]
                        if kind == "clumped":
                            centre = rng.random(2) * (rows, cols)
                            away = np.hypot(*(np.mgrid[0:rows, 0:cols] - centre[:, None, None])) * rng.uniform(
                                0.5, 2, (rows, cols)
                            )
                            cells = np.argsort(away, axis=None)[:count]
                        image.reshape(-1)[cells] = True
                    if kind == "fixed":
                        truth[:] = truth[0]
                    maps = bulk.copy()
                    maps[truth] = 40 * rng.uniform(low, high, truth.sum())
                    yield f"{kind} {share} x{low}-{high} {shape}", maps, truth
