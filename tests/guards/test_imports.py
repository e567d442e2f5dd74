"""Levels of the package, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.guards.source_tree import PACKAGE, ROOT, imported_modules, module_name, parsed, python_files, relative

HEAVY = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "open_clip",
    "scipy",
    "sklearn",
    "matplotlib",
    "onnx",
    "pandas",
)
MODEL_LIBRARIES = ("timm", "transformers", "open_clip", "torchvision.models")
# Modules outside regista.backbones that may import parts of these libraries that are no models
# (optimisers, augmentations, losses, configs): {module: {imported names}}.
EXCEPTIONS: dict[str, set[str]] = {}
MAY_HAVE_EXCEPTIONS = ("regista.train", "regista.objectives", "regista.export", "regista.methods.rats")


def loaded_by(code: str) -> set[str]:
    """Names of the heavy packages that a fresh interpreter holds after running ``code``."""
    code += f"\nimport json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_levels_are_kept() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_model_libraries_only_in_backbones() -> None:
    assert all(module.startswith(MAY_HAVE_EXCEPTIONS) for module in EXCEPTIONS)
    found = []
    for path in python_files("src"):
        if path.is_relative_to(PACKAGE / "backbones"):
            continue
        for name, line in imported_modules(parsed(path)):
            library = any(name == known or name.startswith(f"{known}.") for known in MODEL_LIBRARIES)
            if library and name not in EXCEPTIONS.get(module_name(path), ()):
                found.append(f"{relative(path)}:{line} imports {name}")
    assert not found, "model classes come only through regista.backbones:\n" + "\n".join(found)


def test_report_reads_only_run_folders() -> None:
    allowed = ("regista.results", "regista.report")
    found = [
        f"{relative(path)}:{line} imports {name}"
        for path in python_files("src/regista/report")
        for name, line in imported_modules(parsed(path))
        if name.startswith("regista.") and not name.startswith(allowed)
    ]
    assert not found, "regista.report reads regista.results alone:\n" + "\n".join(found)


def test_import_is_light() -> None:
    assert loaded_by("import regista; regista.__version__; dir(regista)") == set()


def test_help_is_light() -> None:
    run = "from typer.testing import CliRunner; from regista.cli.main import app"
    run += "\nresult = CliRunner().invoke(app, {}); assert result.exit_code == 0, result.output"
    assert loaded_by(run.format("['--help']")) == set()
    assert loaded_by(run.format("['diagnose', '--help']")) == set()


def test_lazy_names_are_real() -> None:
    import regista

    for name in regista.__all__:
        assert getattr(regista, name) is not None
        assert name in dir(regista)
    assert regista.tokens.TokenLayout.__name__ == "TokenLayout"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        regista.lode  # noqa: B018
