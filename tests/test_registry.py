"""Look-up by name: lazy, with hints, open to others, closed to usurpers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from regista import registry
from regista.registry import Registry

ENTRIES = {"dumps": "json:dumps", "decoder": "json.decoder:JSONDecoder.decode", "broken": "no_such_module:thing"}


@pytest.fixture
def codecs() -> Registry:
    return Registry("codec", ENTRIES)


def install(site: Path, package: str, points: dict[str, str], group: str = "regista.codec") -> None:
    """Put a distribution with entry points, and a module, where Python looks."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (site / f"{package}.py").write_text(f"thing = 'made by {package}'\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_in_names(codecs: Registry) -> None:
    assert codecs.names() == ["broken", "decoder", "dumps"]
    assert codecs.get("dumps") is json.dumps
    assert codecs.get("decoder") is json.JSONDecoder.decode
    assert "dumps" in codecs
    assert "loads" not in codecs


def test_unknown_name_is_answered_with_the_nearest(codecs: Registry) -> None:
    with pytest.raises(
        ValueError, match=r"unknown codec 'dump' \(did you mean 'dumps'\?\); known: broken, decoder, dumps"
    ):
        codecs.get("dump")
    with pytest.raises(ValueError, match="unknown codec 'xyz'; known"):
        codecs.get("xyz")
    with pytest.raises(ValueError, match="known: none"):
        Registry("thing", {}).get("x")


def test_what_cannot_be_imported_is_named(codecs: Registry) -> None:
    with pytest.raises(ValueError, match=r"codec 'broken' \(no_such_module:thing, built in\).*No module named"):
        codecs.get("broken")
    with pytest.raises(ValueError, match="no attribute 'nothing'"):
        Registry("codec", {"a": "json:nothing"}).get("a")


@pytest.mark.parametrize("target", ["json", "json:", ":dumps", "a:b:c"])
def test_malformed_entries(target: str) -> None:
    with pytest.raises(ValueError, match="'module:attribute'"):
        Registry("codec", {"a": target})


def test_third_parties_join(site: Path) -> None:
    install(site, "other_pkg", {"theirs": "other_pkg:thing"})
    codecs = Registry("codec", ENTRIES)
    assert codecs.names() == ["broken", "decoder", "dumps", "theirs"]
    assert "other_pkg" not in sys.modules
    assert codecs.get("theirs") == "made by other_pkg"
    assert "theirs" not in Registry("codec", ENTRIES, entry_point_group="regista.elsewhere")
    del sys.modules["other_pkg"]


def test_no_one_takes_a_name_silently(site: Path) -> None:
    install(site, "usurper", {"dumps": "usurper:thing", "own": "usurper:thing"})
    install(site, "rival", {"own": "rival:thing"})
    codecs = Registry("codec", ENTRIES)
    with pytest.raises(
        ValueError, match=r"'dumps' is claimed by json:dumps \(built in\) and usurper:thing \(package usurper\)"
    ):
        codecs.get("dumps")
    with pytest.raises(ValueError, match=r"package (usurper|rival)\) and (usurper|rival):thing"):
        codecs.get("own")
    assert codecs.get("decoder") is json.JSONDecoder.decode  # the others still work
    assert not {"usurper", "rival"} & set(sys.modules)


def test_the_same_said_twice_is_no_clash(site: Path) -> None:
    install(site, "echo_pkg", {"dumps": "json : dumps [extra]"})
    assert Registry("codec", ENTRIES).get("dumps") is json.dumps


def test_it_is_light() -> None:
    code = "import sys, regista.registry; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert registry.__doc__
