"""Files and functions that can be read in one sitting."""

from __future__ import annotations

import ast

from tests.guards.source_tree import parsed, python_files, relative

FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
MAX_FILE = 400
MAX_FUNCTION = 60


def test_no_long_file() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*FOLDERS)}
    found = [f"{path}: {length} lines" for path, length in lengths.items() if length > MAX_FILE]
    assert not found, f"split by meaning; the limit is {MAX_FILE} lines:\n" + "\n".join(found)


def test_no_long_function() -> None:
    found = [
        f"{relative(path)}:{node.lineno} {node.name}: {length} lines"
        for path in python_files(*FOLDERS)
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    ]
    assert not found, f"the limit is {MAX_FUNCTION} lines, signature and docstring included:\n" + "\n".join(found)
