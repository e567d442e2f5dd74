"""The README is short, true and its code runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from regista.data.photos import installed_photos
from tests.guards.source_tree import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [(path, code) for path in PAGES for code in BLOCK.findall(path.read_text(encoding="utf-8"))]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def tables() -> ModuleType:
    """``docs/tables.py`` as a module."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200


def test_readme_has_code() -> None:
    assert any(path == README for path, _ in BLOCKS)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("path", sorted({path for path, _ in BLOCKS}), ids=lambda path: path.name)
def test_code_on_pages_runs(path: Path, tmp_path: Path) -> None:
    for name in ("astronaut", "coffee"):
        photo = next(photo for photo in installed_photos() if photo.name == name)
        (tmp_path / "photos").mkdir(exist_ok=True)
        photo.load().save(tmp_path / "photos" / f"{name}.png")
    codes = [code for page, code in BLOCKS if page == path]
    # every block stands for itself; one process, since the imports take longest
    program = f"for code in {codes!r}:\n    print(code)\n    exec(compile(code, 'page', 'exec'), {{}})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{path.name}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.weights
@pytest.mark.parametrize("page", tables().FILES, ids=lambda path: path.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables().filled(text) == text, f"{page.name}: run `make tables`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    # pages below api/ are made when the pages are built
    missing = [target for target in targets if not target.startswith("api/") and not (path.parent / target).exists()]
    assert not missing, f"{path.name} links to {missing}"
