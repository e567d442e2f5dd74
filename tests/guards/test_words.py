"""What is written here reads the same on every machine and in ten years."""

from __future__ import annotations

import re

import pytest

from tests.guards.source_tree import ROOT, relative

MACHINE_PATHS = re.compile(r"(?<![\w.])(/work/|/root/|/home/\w|/Users/\w|/tmp/\w|/mnt/\w|[A-Z]:\\\\?Users)")
WORDS = re.compile(
    r"\b(sessions?|helpers?|subagents?|chat ?gpt|claude|copilot|issues? (?:#|no\. ?)?\d+)\b", re.IGNORECASE
)
SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".html", ".j2", ".css", ".js", "")
# Words may stand in tests: `scope="session"` is pytest's.
WHERE = {
    "paths": ("src", "docs", "tests", "benchmarks", "examples"),
    "words": ("src", "docs", "benchmarks", "examples"),
}
TOP = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "pyproject.toml",
    "mkdocs.yml",
    ".ci/run",
    ".gitignore",
)


@pytest.mark.parametrize(("kind", "pattern"), [("paths", MACHINE_PATHS), ("words", WORDS)])
def test_no_trace_of_the_workshop(kind: str, pattern: re.Pattern[str]) -> None:
    files = [path for folder in WHERE[kind] for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [ROOT / name for name in TOP]
    found = [
        f"{relative(path)}:{number} {match.group()}"
        for path in sorted(files)
        if path.is_file() and path.name != "test_words.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["open('/home/me/x')", "see /work/shared", "a helper for it", "in issue 12", "this session"]
)
def test_finds_traces(text: str) -> None:
    assert MACHINE_PATHS.search(text) or WORDS.search(text)


@pytest.mark.parametrize(
    "text", ["onnxruntime.InferenceSession(x)", "a/home/x", "a network/workload", "an issue", "../data"]
)
def test_leaves_other_words_alone(text: str) -> None:
    assert not MACHINE_PATHS.search(text)
    assert not WORDS.search(text)
