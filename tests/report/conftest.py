"""Run folders that several tests read; they are never changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.run_folders import FakeModel, make_run

SICK = {"outliers": 6.0, "images": 3, "registers": 2}


@pytest.fixture(scope="session")
def planted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean model and the same with planted artifacts."""
    path = tmp_path_factory.mktemp("runs") / "demo"
    models = (FakeModel("demo"), FakeModel("demo-planted", outliers=6.0, planted=True))
    return make_run(path, *models, kind="demo", notes=["coffee: Rachel Michetti, CC0"])


@pytest.fixture(scope="session")
def register_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sick model with two registers on a grid that is not square."""
    return make_run(tmp_path_factory.mktemp("runs") / "registers", FakeModel("vit-reg", **SICK))
