"""Calling a command as a user types it."""

from __future__ import annotations

import pytest

from regista.cli.main import main


def run(*words: object) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return int(stopped.value.code or 0)
