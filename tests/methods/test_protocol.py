"""What every method must be, whichever folders there are."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regista
from regista import methods
from regista.backbones.tiny import tiny_vit
from regista.methods import protocol
from regista.methods.protocol import Method, State, method_class, method_names
from regista.methods.settings import plain_config
from tests.backbones.probes import close, unchanged

HERE = Path(str(methods.__file__)).parent
# Settings under which a method is done at once; one that is not named here runs with its defaults.
QUICK: dict[str, dict[str, Any]] = {
    "phreg": {"mode": "denoise", "num_views": 2},
    "sinder": {"num_samples": 2000, "num_deviations": 1.5, "ignore_border": False, "min_tokens": 1},
}


def of_this_package() -> list[str]:
    return [name for name in method_names() if (HERE / name).is_dir()]


def test_methods_are_found_by_their_folders() -> None:
    assert {"test_time", "trained"} <= set(method_names())
    folders = {path.parent.name for path in HERE.glob("*/method.py")}
    assert folders <= set(method_names())
    assert method_names() == sorted(method_names())


@pytest.mark.parametrize("name", of_this_package())
def test_a_folder_has_all_its_parts(name: str) -> None:
    folder = HERE / name
    assert {"__init__.py", "config.py", "method.py"} <= {path.name for path in folder.iterdir()}
    kind: Any = import_module(f"regista.methods.{name}.method").METHOD
    assert issubclass(kind, Method)
    assert kind is method_class(name)
    assert kind.name == name
    assert 0 < len(kind.summary) <= 100
    assert "\n" not in kind.summary
    assert not kind.summary.endswith(".")


@pytest.mark.parametrize("name", of_this_package())
def test_a_card_says_where_it_is_from_and_what_it_cannot_do(name: str) -> None:
    title, *rest = (HERE / name / "card.md").read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    card = "\n".join(rest)
    assert "arXiv" in card
    assert "## What it cannot do" in card


@pytest.mark.parametrize("name", method_names())
def test_settings_have_defaults_and_are_documented(name: str) -> None:
    kind = method_class(name)
    assert is_dataclass(kind.config_class)
    config = kind.config_class()
    assert json.loads(json.dumps(plain_config(config))) == plain_config(config)
    documentation = str(kind.config_class.__doc__)
    for setting in fields(kind.config_class):
        assert setting.name in documentation
    assert kind().config == config
    assert kind.config_class.__module__.endswith(f"{name}.config") or name not in of_this_package()


@pytest.mark.parametrize("name", method_names())
def test_a_fixed_model(name: str, sick: Any, images: Tensor, tmp_path: Path) -> None:
    given = images if method_class(name)().needs_images else None
    steps: list[tuple[str, int, int]] = []
    with unchanged(sick.module):
        cured = regista.fix(sick, name, given, progress=lambda *step: steps.append(step), **QUICK.get(name, {}))
    assert cured is not sick
    assert cured.module is not sick.module
    assert sick.history == []
    assert sick.additions == []
    assert all(0 < done <= of for _, done, of in steps)
    three = images.narrow(0, 0, 3)
    features = cured(three)
    assert features.layout == cured.layout((112, 112))
    assert torch.isfinite(features.tokens).all()
    for index, image in enumerate(three.split(1)):
        close(cured(image).tokens, features.tokens.narrow(0, index, 1), 1e-5)
    assert json.loads(json.dumps(cured.history)) == cured.history
    again = regista.load(cured.save_pretrained(tmp_path / "cured"))
    assert torch.equal(again(images).tokens, cured(images).tokens)
    assert again.history == cured.history
    assert again.num_register_tokens == cured.num_register_tokens


@pytest.mark.parametrize("name", method_names())
def test_plain_weights_are_given_or_refused(name: str, sick: Any, images: Tensor) -> None:
    kind = method_class(name)
    cured = regista.fix(sick, name, images, **QUICK.get(name, {}))
    if cured.needs_regista is None:
        assert kind().merge(cured).needs_regista is None
        return
    with pytest.raises(ValueError, match="cannot be plain weights: its "):
        kind().merge(cured)


# Names -------------------------------------------------------------------------------------


def test_hyphens_are_underscores() -> None:
    assert method_class("test-time") is method_class("test_time")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_tiem", r"unknown method 'test_tiem' \(did you mean 'test_time'\?\); known: .*trained"),
        ("trian", r"did you mean 'trained'"),
        ("zzz", r"unknown method 'zzz'; known: "),
        ("protocol", "unknown method 'protocol'"),
        ("settings", "unknown method 'settings'"),
    ],
)
def test_unknown_methods_are_told_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_class(name)


# Other packages ----------------------------------------------------------------------------


class Doubled(Method):
    """A method of another package."""

    name = "doubled"
    summary = "registers that are their own neighbours"
    config_class = method_class("trained").config_class
    needs_images = False

    def fit(self, backbone: Any, images: Any = None, **_options: Any) -> State:
        return State({"given": images is not None})

    def apply(self, backbone: Any, state: State) -> Any:
        return backbone.with_registers(torch.ones(2, backbone.embed_dim))


def test_other_packages_join_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("doubled", f"{__name__}:Doubled", protocol.ENTRY_POINT_GROUP)
    monkeypatch.setattr(protocol, "entry_points", lambda *, group: [point] if group == point.group else [])
    assert "doubled" in method_names()
    assert method_class("doubled").name == "doubled"
    fixed = regista.fix(tiny_vit(), "doubled")
    assert fixed.num_register_tokens == 2
    assert fixed.history[0]["state"] == {"given": False}
    with pytest.raises(ValueError, match="did you mean 'doubled'"):
        method_class("duobled")
