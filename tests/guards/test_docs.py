"""The pages name every command, option group and module there is."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest
import typer.main
import yaml

from regista.cli.main import app
from tests.guards.source_tree import ROOT, module_name, python_files

DOCS = ROOT / "docs"
GROUP: Any = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)


def reference() -> ModuleType:
    """``docs/reference.py`` as a module."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(*pages: str) -> str:
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_described(command: str) -> None:
    assert f"`regista {command}" in text_of("README.md")
    assert f"## regista {command}" in text_of("docs/commands.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_described(command: str) -> None:
    page = text_of("docs/commands.md")
    options = [parameter for parameter in GROUP.commands[command].params if parameter.param_type_name == "option"]
    missing = [parameter.opts[-1] for parameter in options if f"`{parameter.opts[-1]}" not in page]
    assert not missing, f"docs/commands.md says nothing of {missing}"


def test_no_page_uses_a_command_that_is_not_there() -> None:
    pages = [path for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if path.name != "contributing.md"]
    found = set()
    for path in pages:
        for line in path.read_text(encoding="utf-8").splitlines():
            called = re.findall(r"`regista ([a-z]+)", line) + re.findall(r"^ {4}regista ([a-z]+)", line)
            found |= {f"{path.name}: {name}" for name in called if name not in COMMANDS}
    assert not found


def test_every_module_has_its_reference() -> None:
    shown = {module for modules in reference().parts().values() for module in modules}
    wanted = {module_name(path) for path in python_files("src/regista") if "/cli/" not in path.as_posix()}
    assert shown == {name for name in wanted if name != "regista" and "._" not in name}


def test_every_page_is_in_the_menu() -> None:
    def pages(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [page for child in children for page in pages(child)]

    class Loader(yaml.SafeLoader):
        """YAML with mkdocs' own tags left alone."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = pages(config["nav"])
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
