"""Bars on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from regista.cli.progress import progress_bar, stages


class Terminal(io.StringIO):
    """Something that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """No fixture: pytest puts its own stream back between setup and test."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_a_bar_shows_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with progress_bar("diagnosis", 7) as done:
        done(3)
    assert "diagnosis" in terminal.getvalue()
    assert "3/7" in terminal.getvalue()


def test_each_kind_of_work_has_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with stages() as progress:
        for done in (1, 2):
            progress("targets", done, 2)
        progress("student", 5, 9)
    shown = terminal.getvalue()
    assert "targets" in shown
    assert "2/2" in shown
    assert "student" in shown
    assert "5/9" in shown


def test_silence_when_asked_and_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with stages(quiet=True) as progress, progress_bar("a", 1, quiet=True) as bar:
        progress("targets", 1, 2)
        bar(1)
    assert not terminal.getvalue()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with stages() as progress, progress_bar("a", 1) as bar:
        progress("targets", 1, 2)
        bar(1)
    assert not file.getvalue()


def test_what_the_library_says_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("regista.somewhere")
    before = logging.getLogger("regista").level
    for screen in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", screen)
        with stages():
            logger.info("so much room on the disk")
        assert screen.getvalue().count("so much room on the disk") == 1
        with stages(quiet=True):
            logger.info("more")
        logger.info("behind it")
        assert "more" not in screen.getvalue()
        assert "behind" not in screen.getvalue()
    assert logging.getLogger("regista").level == before
