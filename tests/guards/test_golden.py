"""Public names and command options change only on purpose: ``make golden`` writes the lists again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.guards.golden import OPTIONS, PUBLIC, SURFACE, command_options, difference, public_surface, signature


def test_public_names_are_as_listed() -> None:
    changes = difference(SURFACE, public_surface())
    assert not changes, "public names changed; if that is meant, run `make golden`:\n" + "\n".join(changes)


def test_command_options_are_as_listed() -> None:
    changes = difference(OPTIONS, command_options())
    assert not changes, "command options changed; if that is meant, run `make golden`:\n" + "\n".join(changes)


def test_the_doors_are_listed() -> None:
    import regista

    assert {f"regista.{name}" for name in regista.__all__ if name != "__version__"} <= set(PUBLIC)


def test_signatures_read_as_written() -> None:
    def call(a: int, b: str = "x", *, c: float | None = None, **rest: object) -> None: ...

    assert signature(call) == "(a: int, b: str = 'x', *, c: float | None = None, **rest: object)"


def test_every_change_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"gone": "()", "same": "()", "other": "(a)"}))
    assert difference(path, {"same": "()", "other": "(b)", "more": "()"}) == [
        "gone: gone",
        "new: more",
        "other: was (a), is (b)",
    ]
