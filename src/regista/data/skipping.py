"""Which files could not be read, told to whoever wants to know, however deep down they were skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_LISTENERS: ContextVar[tuple[dict[str, str], ...]] = ContextVar("regista-skipped-files", default=())


@contextmanager
def skipped_files() -> Iterator[dict[str, str]]:
    """A dict {file: reason} that grows while the context is open: each file once, however often it is tried."""
    found: dict[str, str] = {}
    token = _LISTENERS.set((*_LISTENERS.get(), found))
    try:
        yield found
    finally:
        _LISTENERS.reset(token)


def tell_skipped(path: str | Path, reason: str) -> None:
    """Say that a file was left out."""
    for found in _LISTENERS.get():
        found[str(path)] = reason
