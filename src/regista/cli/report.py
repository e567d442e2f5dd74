"""``regista report``: make the page of a run folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, e.g. runs/demo.")],
) -> None:
    """Write RUN/report.html again from what the run folder holds."""
    from regista.report.html import write_report

    typer.echo(write_report(run))
