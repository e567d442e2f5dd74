"""Builds the Python reference: one page for each part of the package, made from its docstrings.

mkdocs runs this (``hooks`` in mkdocs.yml), so a new module is in the reference without an edit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parent.parent / "src"
NOT_SHOWN = ("cli", "recipes")  # the command has a page of its own


def parts() -> dict[str, list[str]]:
    """{part of the package: its public modules}, in alphabetical order."""
    found: dict[str, list[str]] = {}
    for path in sorted((SOURCE / "regista").rglob("*.py")):
        names = path.relative_to(SOURCE).with_suffix("").parts
        if len(names) < 3 and names[-1] == "__init__":
            continue
        module = names[:-1] if names[-1] == "__init__" else names
        part = module[1]
        if part not in NOT_SHOWN and not any(name.startswith("_") for name in module):
            found.setdefault(part, []).append(".".join(module))
    return found


def page(part: str, modules: list[str]) -> str:
    """The text of one page: a package first, then its modules."""
    package = f"regista.{part}"
    ordered = sorted(modules, key=lambda module: (module != package, module))
    return f"# {package}\n\n" + "\n\n".join(f"::: {module}" for module in ordered) + "\n"


def index() -> str:
    """The first page: the short names, then what each part is for."""
    lines = ["# Python reference", "", "These three are all that most programs need:", ""]
    doors = ("regista.backbones.loading.load", "regista.diagnosis.examination.diagnose")
    doors += ("regista.backbones.grad_cam.reshape_transform",)
    lines += [f"- [`regista.{door.rpartition('.')[2]}`][{door}]" for door in doors]
    lines += ["", "Everything else, by part:", ""]
    lines += [f"- [`regista.{part}`]({part}.md)" for part in parts()]
    return "\n".join(lines) + "\n"


def on_config(config: Any) -> Any:
    """Put the pages into the menu."""
    pages: list[Any] = ["api/index.md", *({f"regista.{part}": f"api/{part}.md"} for part in parts())]
    config["nav"].append({"Python reference": pages})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages to what is built."""
    texts = {"index": index(), **{part: page(part, modules) for part, modules in parts().items()}}
    for name, text in texts.items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files
