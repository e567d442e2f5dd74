"""A progress bar on a terminal; silence anywhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def progress_bar(title: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of images done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def stages(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that takes (what, done, of): a bar for each kind of work, one after the other.

    What the library logs meanwhile, such as the room that it will take on the disk, is shown too.
    """
    if quiet:
        yield lambda what, done, of: None
        return
    if not sys.stderr.isatty():
        with _heard(lambda text: typer.echo(text, err=True)):
            yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, Any] = {}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, transient=True) as bar, _heard(console.print):

        def update(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done, total=of)

        yield update


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextmanager
def _heard(say: Callable[[str], None]) -> Iterator[None]:
    """Lines of the library's logger go to ``say``."""
    logger, handler = logging.getLogger("regista"), _Lines(say)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
