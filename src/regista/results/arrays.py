"""Arrays on disk: safetensors for what is read whole, .npy for what is filled bit by bit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from regista.results.writing import in_words, write_whole

DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays into one safetensors file, whole or not at all.

    Raises:
        ValueError: for a type that is not in ``DTYPES``, or if the file cannot be written.
    """
    ready: dict[str, np.ndarray] = {}
    for key, given in arrays.items():
        array = np.asarray(given)
        if array.dtype.name not in DTYPES:
            raise ValueError(f"{path}: array {key!r} is of type {array.dtype}; wanted one of {', '.join(DTYPES)}")
        ready[key] = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    write_whole(path, lambda partial: save_file(ready, partial))


def load_arrays(path: Path, keys: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Read arrays of a safetensors file, all or some. The file is memory-mapped: only ``keys`` are read.

    Raises:
        ValueError: if the file is missing or damaged, or has no such key.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            there = list(file.keys())
            unknown = [key for key in keys or () if key not in there]
            if unknown:
                raise ValueError(f"{path} has no array {', '.join(unknown)}; it has {', '.join(there) or 'none'}")
            return {key: file.get_tensor(key) for key in (there if keys is None else keys)}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot read arrays ({in_words(error)})") from error


def make_memmap(path: Path, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """A new .npy file of zeros, memory-mapped, its space on disk taken at once.

    A file that is there already with this shape and type is opened as it is.

    Raises:
        ValueError: if another array or no array is there, or the disk has no room.
    """
    wanted = (tuple(int(side) for side in shape), np.dtype(dtype))
    if path.exists():
        try:
            found = open_memmap(path, mode="r+")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot open the array ({error})") from error
        if (found.shape, found.dtype) != wanted:
            raise ValueError(f"{path} holds {found.shape} {found.dtype}, wanted {wanted[0]} {wanted[1]}")
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        array = open_memmap(path, mode="w+", dtype=wanted[1], shape=wanted[0])
        if hasattr(os, "posix_fallocate"):  # else a full disk kills the process when it writes
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ValueError(f"cannot make {path} of shape {wanted[0]}: {in_words(error)}") from error
    return array
