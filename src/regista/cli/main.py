"""Entry point: builds the command, turns a user's mistake into one line.

Commands import the library inside their functions, so that ``regista --help`` loads no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from regista.cli import ablate, compare, demo, diagnose, doctor, extract, fix, inspect, report

app = typer.Typer(
    name="regista",
    help="Registers of Vision Transformers: is a model sick, where, and from which block on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.command("inspect")(inspect.command)
app.command("diagnose")(diagnose.command)
app.command("fix")(fix.command)
app.command("compare", cls=compare.ImagesCommand)(compare.command)
app.command("ablate")(ablate.command)
app.command("extract")(extract.command)
app.command("report")(report.command)
app.command("doctor")(doctor.command)


@app.callback(invoke_without_command=True)
def version_option(
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and stop."),
) -> None:
    """Registers of Vision Transformers: is a model sick, where, and from which block on."""
    if version:
        import regista

        typer.echo(f"regista {regista.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends with one line on stderr and exit code 1."""
    try:
        app(args=arguments)
    except (ValueError, OSError) as error:
        if os.environ.get("REGISTA_TRACEBACK"):
            raise
        typer.echo(f"regista: {_one_line(error)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("regista: interrupted", err=True)
        sys.exit(130)


def _one_line(error: Exception) -> str:
    text: Any = str(error) or type(error).__name__
    return " ".join(str(text).split())


if __name__ == "__main__":
    main()
