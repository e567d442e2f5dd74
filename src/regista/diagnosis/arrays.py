"""Per-image arrays of a streaming pass: in memory while few, on disk when many."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IN_MEMORY = 256


class _Owner:
    """While this is referenced, the files of a store stay."""


class ArrayStore:
    """Named float arrays with one row an image, filled batch by batch.

    Up to 256 images they lie in memory; beyond that each is a memory-mapped file in a
    temporary folder that goes when the store is no longer referenced.

    Args:
        count: Number of images.
        folder: Where to put the files instead, kept afterwards.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        self.count = count
        self.on_disk = count > IN_MEMORY
        self._folder = folder
        self._owner = _Owner()
        if self.on_disk and folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="regista-"))
            weakref.finalize(self._owner, shutil.rmtree, self._folder, ignore_errors=True)
        self._arrays: dict[str, np.ndarray] = {}

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` (b, ...) as rows start .. start + b."""
        rows = values.detach().to("cpu", torch.float32).numpy()
        if name not in self._arrays:
            self._arrays[name] = self._allocate(name, (self.count, *rows.shape[1:]))
        self._arrays[name][start : start + len(rows)] = rows

    def get(self, name: str) -> Tensor:
        """The whole array as a tensor that shares its memory (or its file)."""
        return torch.from_numpy(self._arrays[name])

    def trim(self, count: int) -> None:
        """Forget rows beyond ``count``: images that could not be read."""
        self.count = count
        self._arrays = {name: rows[:count] for name, rows in self._arrays.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def keep_alive(self) -> object:
        """What must stay referenced while tensors from ``get`` are in use."""
        return self._owner

    def _allocate(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if not self.on_disk or self._folder is None:
            return np.zeros(shape, dtype=np.float32)
        return np.lib.format.open_memmap(self._folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
