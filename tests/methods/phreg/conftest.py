"""Small photos of many shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SIZES = [(40, 60), (64, 48), (50, 50), (30, 200), (33, 47)]  # (height, width)


def photo(path: Path, size: tuple[int, int], seed: int) -> Path:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)).resize(size[::-1])
    noisy = np.asarray(coarse).astype(int) + rng.integers(-20, 20, (*size, 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "photos"
    folder.mkdir()
    return [photo(folder / f"{index}.png", size, index) for index, size in enumerate(SIZES)]
