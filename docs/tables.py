"""Write the generated tables of README.md and docs/: ``make tables``.

A table stands between ``<!-- NAME:begin (make tables) -->`` and ``<!-- NAME:end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "src" / "regista" / "methods"
FILES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "commands.md")
MARKED = re.compile(r"(<!-- (\w+):begin \(make tables\) -->\n).*?(<!-- \2:end -->)", re.DOTALL)
PAPER = "[{number}](https://arxiv.org/abs/{number})"

# name: (what it does, arXiv number); the state and the numbers come from methods/<name>/card.md
KNOWN = {
    "trained": ("register tokens learned in training: supervised, self-supervised or with text", "2309.16588"),
    "test_time": ("registers without training: outlier activations are moved to an added token", "2506.08010"),
    "phreg": ("registers for a pretrained ViT, by self-distillation from its own denoised features", "2505.21501"),
    "reap": ("random registers and cluster replacement, for few-shot learning across domains", "2506.02843"),
    "rats": ("attention through registers: compress, communicate, broadcast; parts emerge", "2606.14701"),
    "neighbour_average": ("baseline: outlier tokens become the mean of their neighbours", ""),
    "sinder": ("baseline: tokens along a singular defect direction are smoothed, untrained", "2407.16826"),
    "last": ("selective aggregation of patches instead of the CLS read-out", "2602.22394"),
}
PLANNED_COMMANDS = {
    "fix": "Cure a model with one of the methods below.",
    "compare": "Several models on the same images, before and after.",
    "evaluate": "What the features are worth: one task, one number, one record.",
    "train": "Train a ViT that never gets sick.",
    "parts": "Parts of objects that registers found.",
}


def commands() -> str:
    """The ``regista`` commands, with the first line of their help."""
    import typer.main

    from regista.cli.main import app

    group: Any = typer.main.get_command(app)
    rows = [f"| `regista {name}` | {first_line(command.help)} |" for name, command in group.commands.items()]
    rows += [f"| {name} | *planned:* {text} |" for name, text in PLANNED_COMMANDS.items() if name not in group.commands]
    return table("| command | what it does |", rows)


def methods() -> str:
    """Every method, with its measured numbers where it exists."""
    names = [
        *KNOWN,
        *(path.parent.name for path in sorted(METHODS.glob("[a-z]*/card.md")) if path.parent.name not in KNOWN),
    ]
    rows = []
    for name in names:
        text, number = KNOWN.get(name, ("", ""))
        paper = PAPER.format(number=number) if number else ""
        rows.append(f"| `{name}` | {text} | {paper} | {measured(METHODS / name / 'card.md')} |")
    return table("| name | what it does | paper | measured |", rows)


def measured(card: Path) -> str:
    """The line of a card that begins with "Measured:"; "planned" without a card."""
    if not card.is_file():
        return "planned"
    lines = [line for line in card.read_text(encoding="utf-8").splitlines() if line.startswith("Measured:")]
    return lines[0].removeprefix("Measured:").strip() if lines else "see its card"


def photos() -> str:
    """Who made the demo's photos."""
    from regista.data.photos import installed_photos

    return "\n".join(f"- `{photo.name}`: {photo.credit}" for photo in installed_photos()) + "\n"


def first_line(text: str | None) -> str:
    """The first sentence of a help text."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def table(head: str, rows: list[str]) -> str:
    """A Markdown table."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


TABLES: dict[str, Callable[[], str]] = {"commands": commands, "methods": methods, "photos": photos}


def filled(text: str) -> str:
    """A page with every table made anew."""
    return MARKED.sub(lambda match: match.group(1) + TABLES[match.group(2)]() + match.group(3), text)


def main() -> None:
    """Rewrite the pages."""
    for path in FILES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
