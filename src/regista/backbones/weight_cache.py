"""Tensors that are slow to make, kept between runs: one safetensors file each, with a fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

ENVIRONMENT_VARIABLE = "REGISTA_CACHE"


def cache_directory() -> Path:
    """``$REGISTA_CACHE``, else ``$XDG_CACHE_HOME/regista``, else ``~/.cache/regista``."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regista"


def fingerprint(*parts: object) -> str:
    """SHA-256 over files (``Path``: their content) and over the text of everything else."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        else:
            digest.update(str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def read_cached(name: str, source: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and metadata stored under ``name``, or None.

    A file that is missing, damaged or made from another ``source`` counts as absent.
    """
    path = cache_directory() / f"{name}.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("source") != source:
                return None
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(header["metadata"])  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def write_cached(name: str, source: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Store tensors and JSON-serialisable metadata under ``name``: write, fsync, rename.

    A cache that cannot be written (read-only, disk full) is passed over: it only costs time.
    """
    directory = cache_directory()
    header = {"source": source, "metadata": json.dumps(metadata)}
    contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    temporary = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(save(contiguous, metadata=header))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(directory / f"{name}.safetensors")
    except OSError:
        with contextlib.suppress(OSError):
            if temporary:
                Path(temporary).unlink()
