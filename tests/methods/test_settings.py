"""Settings of methods from keywords and from the command line."""

from __future__ import annotations

import pytest

from regista.methods.phreg.config import PhregConfig
from regista.methods.settings import configured, parsed, plain_config


def test_values_are_made_to_fit() -> None:
    given = {"lr": 1, "lr_candidates": [1e-3, 1], "image_size": None, "registers": 3, "targets": "fresh"}
    config = configured(PhregConfig, given, what="phreg")
    assert (config.lr, config.lr_candidates, config.image_size, config.registers) == (1, (1e-3, 1), None, 3)
    assert plain_config(config)["lr_candidates"] == [1e-3, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"register": 3}, r"no setting 'register' \(did you mean 'registers'\?\)"),
        ({"registers": 2.5}, "registers wants a whole number, got 2.5"),
        ({"registers": True}, "registers wants a whole number, got True"),
        ({"lr": "fast"}, "lr wants a number or None, got 'fast'"),
        ({"targets": "none"}, "targets wants 'stored' or 'fresh', got 'none'"),
        ({"lr_candidates": 3}, "lr_candidates wants a list, got 3"),
        ({"registers": -1}, "registers is a number of tokens"),
        ({"held_out": 1.0}, "held_out is a share"),
    ],
)
def test_mistakes(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(PhregConfig, given, what="method 'phreg'")


def test_words_of_the_command_line() -> None:
    words = ["lr=1e-4", "registers=3", "flip=true", "lr_candidates=[1e-3, 0.1]", "unfrozen=block:-1", "image_size=null"]
    found = parsed(words)
    assert found == {
        "lr": 1e-4,
        "registers": 3,
        "flip": True,
        "lr_candidates": [1e-3, 0.1],
        "unfrozen": "block:-1",
        "image_size": None,
    }
    with pytest.raises(ValueError, match="given twice"):
        parsed(["a=1", "a=2"])
    with pytest.raises(ValueError, match="cannot be read"):
        parsed(["a=[1"])
