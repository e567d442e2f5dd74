"""Files that are whole or not there at all, and values that JSON can hold."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from safetensors import SafetensorError

PARTIAL = ".partial"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place, flush it to disk, then rename it into place.

    Args:
        path: Where it goes; an old file there stays as it was until the new one is whole.
        write: Writes the content to the path it is given.

    Raises:
        ValueError: if it cannot be written (disk full, no permission ...); nothing is left of it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)  # safetensors makes its files private
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {path}: {in_words(error)}; what was there before is unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    _flush_folder(path.parent)


def in_words(error: Exception) -> str:
    """Why a file operation failed."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def plain(value: Any, where: str, not_finite: list[str]) -> Any:
    """A value as JSON has it: None, bool, int, float, str, list, dict with text keys.

    Args:
        value: Also arrays and numbers of numpy, paths, enums, tuples, sets, dataclasses.
        where: Name of the value, for messages.
        not_finite: Gets an entry for every NaN and infinity, which become None.

    Raises:
        ValueError: for any other type, naming the value.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        not_finite.append(f"{where}: {value}")
        return None
    if isinstance(value, (str, PurePath)):
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")  # file names may be no text
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}".lstrip("."), not_finite) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]", not_finite) for index, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold; make it numbers, text or lists")


def _key(key: Any, where: str) -> str:
    if isinstance(key, Enum):
        key = key.value
    if not isinstance(key, (str, int, PurePath)):
        raise ValueError(f"{where} has the key {key!r}; keys are text")
    return str(plain(str(key), where, []))


def _flush_folder(folder: Path) -> None:
    """Make the renaming itself last, where folders can be flushed."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
