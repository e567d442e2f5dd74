"""LAST's pooling as a method: only what is read out of the tokens changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regista
from regista.backbones.tiny import tiny_vit
from regista.methods.last import PooledVotes, SelectivePool, patch_scores, patch_votes
from tests.backbones.probes import close, pictures


def test_the_image_vector_is_pooled_and_tokens_stay() -> None:
    backbone = tiny_vit(num_register_tokens=2)
    images = pictures(backbone, 3)
    fixed = regista.fix(backbone, "last", k=5)
    features = fixed(images)
    assert torch.equal(features.tokens, backbone(images).tokens)
    vector = fixed.global_vector(features.tokens, features.layout)
    wanted = SelectivePool(5).pool_with_votes(features.patches)
    assert isinstance(wanted, PooledVotes)
    close(vector, wanted.pooled, 1e-6)
    assert torch.equal(patch_votes(fixed, features).flatten(1), wanted.votes)
    assert int(patch_votes(fixed, features).sum()) == 3 * 5 * 64
    assert patch_votes(fixed, features).shape == (3, 6, 5)
    cosines = torch.cosine_similarity(features.patches, vector.unsqueeze(1), dim=-1)
    close(patch_scores(features.patches, vector), cosines, 1e-5)
    assert fixed.history == [
        {
            "method": "last",
            "config": {"k": 5, "variant": "paper", "eps": 1e-6},
            "state": {"k": 5, "variant": "paper", "eps": 1e-6},
        }
    ]


def test_the_default_share_picks_a_quarter() -> None:
    fixed = regista.fix(tiny_vit(), "last")
    features = fixed(pictures(fixed, 1, (8 * 14, 8 * 14)))
    assert int(patch_votes(fixed, features).sum()) == 16 * 64


def test_the_latest_settings_hold(tmp_path: Path) -> None:
    backbone = tiny_vit()
    twice = regista.fix(regista.fix(backbone, "last", k=2), "last", k=7, variant="released")
    once = regista.fix(backbone, "last", k=7, variant="released")
    features = backbone(pictures(backbone))
    wanted = once.global_vector(features.tokens, features.layout)
    for model in (twice, regista.load(twice.module), regista.load(twice.save_pretrained(tmp_path / "model"))):
        assert torch.equal(model.global_vector(features.tokens, features.layout), wanted)
        assert len(model.additions) == 1


def test_a_model_without_it_has_no_votes() -> None:
    backbone = tiny_vit()
    with pytest.raises(ValueError, match=r"no selective pooling; use regista.fix"):
        patch_votes(backbone, backbone(pictures(backbone)))


@pytest.mark.parametrize(
    ("config", "words"),
    [({"k": 0}, "k must be"), ({"k": 1.5}, "k must be"), ({"variant": "mine"}, "variant"), ({"eps": -1.0}, "eps must")],
)
def test_wrong_settings_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        regista.fix(tiny_vit(), "last", **config)  # type: ignore[arg-type]
