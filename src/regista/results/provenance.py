"""Where numbers come from: versions, commit and weights."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from regista import __version__

LIBRARIES = ("torch", "torchvision", "timm", "transformers", "open_clip_torch", "numpy")


def library_versions() -> dict[str, str | None]:
    """Versions of python and of the libraries that make numbers, None if absent; imports none of them."""
    versions: dict[str, str | None] = {"regista": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def source_commit() -> str | None:
    """Git commit of this package's source, "+changes" if it was edited since; None if not from git."""
    here = Path(__file__).resolve()
    package = here.parents[1]
    # An environment may lie inside another repository: its commit says nothing about this file.
    if _git(package, "ls-files", "--error-unmatch", str(here)) is not None:
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", str(package))
        return f"{commit}+changes" if commit and changed else commit
    try:
        text = metadata.distribution("regista").read_text("direct_url.json")
        origin: Any = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, ValueError):
        return None
    found = origin.get("vcs_info", {}).get("commit_id")
    return str(found) if found else None


def weights_hash(arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """SHA-256 of named arrays: of their names, types, shapes and bytes, in whatever order they come.

    Each array is hashed when it comes and then let go, so that weights may be streamed. Types
    that numpy lacks (bfloat16) come as a view of the same bytes.

    Args:
        arrays: (name, array) pairs, for example the ``items()`` of a dict.

    Raises:
        ValueError: for a name that comes twice, or an array that has no bytes of its own (objects).
    """
    digests: dict[str, str] = {}
    for name, array in arrays:
        if name in digests:
            raise ValueError(f"two arrays are named {name!r}")
        if array.dtype.hasobject:
            raise ValueError(f"array {name!r} holds objects ({array.dtype}), which cannot be hashed")
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        content = hashlib.sha256(native.reshape(-1).view(np.uint8).data)
        digests[name] = f"{array.dtype.newbyteorder('<').str} {list(array.shape)} {content.hexdigest()}"
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(json.dumps([name, digests[name]]).encode())
    return whole.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command, None if it fails or there is no git."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
