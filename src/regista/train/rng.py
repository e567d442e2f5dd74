"""States of all random number generators: kept, restored and set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The generators of torch (CPU, and the current CUDA device), numpy and Python, as tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  the global one
    assert name == "MT19937"
    _, words, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor(float(gauss), dtype=torch.float64),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """The inverse of ``random_state``; what is not in ``state`` is left alone."""
    torch.set_rng_state(state["torch"])
    *keys, position, has_gauss = state["numpy"].tolist()
    values = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"]))
    np.random.set_state(values)  # noqa: NPY002
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss.pop() if gauss else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Give all generators their states back on exit."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)


@contextmanager
def seeded_item(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, numpy and Python while one item is made; no other is touched."""
    before: Any = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def mixed_seed(*numbers: int) -> int:
    """One seed below 2^63 from several numbers of 0 or more, such as run seed, epoch and index.

    Neighbouring numbers give unrelated seeds (numpy's ``SeedSequence``).
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64).item() >> 1)
