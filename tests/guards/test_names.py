"""Names that say what is inside, and never mean two things."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.guards.source_tree import PACKAGE, ROOT, parsed, python_files, relative

SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc", "tools", "stuff"}
ENTRY_POINTS = {"main"}


def test_names_say_something() -> None:
    found = [
        relative(path)
        for path in python_files("src", "tests", "examples", "benchmarks")
        if SAY_NOTHING.intersection(part.removesuffix(".py").strip("_") for part in path.relative_to(ROOT).parts)
    ]
    assert not found, f"name a file by what it holds, not {sorted(SAY_NOTHING)}: {found}"


def public_callables(tree: ast.Module) -> set[str]:
    """Functions and classes that a file defines or lists in ``__all__``, and those it imports by name."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets
        ):
            found.update(str(name) for name in ast.literal_eval(node.value))
    return {name for name in found if not name.startswith("_")}


def clashes(package: Path) -> list[str]:
    """Modules of a package that bear the name of a callable in them or at the package's door."""
    door = public_callables(parsed(package / "__init__.py"))
    found = []
    for path in sorted(package.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            own = {node.name for node in parsed(path).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
            if path.stem in own - ENTRY_POINTS | door:
                found.append(f"{path.name} and {path.stem}()")
        elif (path / "__init__.py").is_file() and path.name in door:
            found.append(f"{path.name}/ and {path.name}()")
    return found


def test_no_module_bears_the_name_of_a_callable() -> None:
    packages = [path.parent for path in python_files("src") if path.name == "__init__.py"]
    found = [f"{relative(package)}: {clash}" for package in packages for clash in clashes(package)]
    assert not found, "`import a.b` would give a module or a function, by chance:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"__init__.py": "from p.iou import iou", "iou.py": ""}, 1),
        ({"__init__.py": "", "iou.py": "def iou(): ..."}, 1),
        ({"__init__.py": "__all__ = ['iou']", "iou/__init__.py": ""}, 1),
        ({"__init__.py": "from p.iou import mean_iou", "iou.py": "def mean_iou(): ..."}, 0),
    ],
)
def test_finds_clashes(tmp_path: Path, files: dict[str, str], wanted: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert len(clashes(tmp_path)) == wanted


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in python_files("src/regista")}
    missing = [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not missing, f"no __init__.py in {missing}"
    assert (PACKAGE / "py.typed").is_file()
