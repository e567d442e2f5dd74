"""Random label maps of one image, of many kinds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def pairs(count: int = 40, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(pred, target): noise, blocks, unequal region sizes, gaps between the ids, one region, one pixel."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        height, width = (int(side) for side in rng.integers(1, 14, 2))
        maps = []
        for _ in range(2):
            regions = int(rng.integers(1, 7))
            ids = rng.choice(30, regions, replace=False) - (5 if index % 3 == 0 else 0)
            shares = rng.dirichlet(np.ones(regions) * 0.7)
            labels = ids[rng.choice(regions, (height, width), p=shares)]
            if index % 2:
                labels = np.repeat(np.repeat(labels[::3, ::3], 3, 0), 3, 1)[:height, :width]
            maps.append(labels)
        pred, target = maps
        yield pred, np.where(rng.random(target.shape) < 0.5, pred, target) if index % 5 == 0 else target
