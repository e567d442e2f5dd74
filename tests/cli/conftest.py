"""Three small photos in a folder of their own, which is where the command runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index, size in enumerate([(60, 80), (80, 60), (64, 64)]):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return folder
