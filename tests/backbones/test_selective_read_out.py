"""Selective pooling as a model's image vector, against the slow pooling of the released code's description."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regista
from regista.backbones.additions import add_from_records
from regista.backbones.base import Backbone
from regista.backbones.selective_read_out import SelectiveReadOut
from regista.backbones.tiny import tiny_vit
from tests.backbones.probes import close, pictures, randomise, unchanged
from tests.layers.shipped_pool import slow_pool


def other(file: str, call: Callable[[Any], Any]) -> Callable[[], Backbone]:
    return lambda: regista.load(randomise(call(importlib.import_module(f"tests.backbones.{file}"))))


MODELS: dict[str, Callable[[], Backbone]] = {
    "timm": lambda: tiny_vit(num_register_tokens=4),
    "timm without CLS": lambda: tiny_vit(class_token=False),
    "timm siglip": other("test_timm", lambda tests: tests.named("vit_base_patch16_siglip_224", img_size=64)()),
    "hf siglip": other("test_transformers", lambda tests: tests.MODELS["siglip vision"]()),
    "open_clip": other("test_open_clip", lambda tests: tests.model("plain")),
}


def pooled(backbone: Backbone, k: Any = 3, variant: Any = "paper", eps: float = 1e-4) -> Backbone:
    new = copy.deepcopy(backbone)
    new.add(SelectiveReadOut(k, variant, eps))
    return new


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", ["paper", "released"])
@torch.no_grad()
def test_the_image_vector_is_the_slow_pooling(name: str, variant: str) -> None:
    backbone = MODELS[name]()
    new = pooled(backbone, 3, variant)
    images = pictures(backbone, 3)
    with unchanged(new.module):
        features = new(images)
        got = new.global_vector(features.tokens, features.layout)
    wanted, votes = slow_pool(features.patches, 3, variant, 1e-4)
    close(got, wanted, 1e-5)
    (addition,) = new.additions
    assert isinstance(addition, SelectiveReadOut)
    assert torch.equal(addition.votes(features.tokens, features.layout).flatten(1), votes)
    assert torch.equal(features.tokens, backbone(images).tokens)
    plain = backbone.global_vector(features.tokens, features.layout)
    assert (got - plain).abs().max() > 1e-2
    one = [new(image) for image in images.split(1)]
    close(got, torch.cat([new.global_vector(each.tokens, each.layout) for each in one]), 1e-5)


@pytest.mark.parametrize("name", ["timm siglip", "hf siglip"])
def test_a_pooling_head_is_not_asked_any_more(name: str) -> None:
    backbone = MODELS[name]()
    assert "pool.attn" in backbone.sites()
    new = pooled(backbone)
    assert "pool.attn" not in new.sites()
    assert regista.diagnose(new, pictures(backbone, 2)).attention_queries == ["mean over queries"]


@torch.no_grad()
def test_what_reads_the_image_vector_reads_the_pooling() -> None:
    from regista.export.features import extract_features

    backbone = tiny_vit()
    new = pooled(backbone)
    images = pictures(backbone, 2)
    patches = new(images).patches
    vector, _ = slow_pool(patches, 3, "paper", 1e-4)
    close(torch.from_numpy(extract_features(new, [images])["pooled"]), vector, 1e-5)
    scores = torch.cosine_similarity(patches, vector.unsqueeze(1), dim=-1)
    found = regista.diagnose(new, images)
    shown = {name: array for name, array in found.arrays.items() if "score" in name}
    (array,) = shown.values()
    close(torch.from_numpy(array).flatten(1), scores, 1e-3)


def test_a_deep_copy_reads_its_own() -> None:
    new = pooled(tiny_vit())
    again = copy.deepcopy(new)
    images = pictures(new)
    features = new(images)
    wanted = again.global_vector(features.tokens, features.layout)
    for addition in new.additions:
        assert isinstance(addition, SelectiveReadOut)
        addition.pool.k = 1
    assert torch.equal(again.global_vector(features.tokens, features.layout), wanted)
    assert not torch.equal(new.global_vector(features.tokens, features.layout), wanted)
    children = [child for child in again.module.children() if isinstance(child, SelectiveReadOut)]
    assert children == again.additions
    assert again.global_vector.__self__ is children.pop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [2, 0.25, 1, 1.0])
def test_records_folders_and_live_modules_bring_it_back(k: int | float, tmp_path: Path) -> None:
    new = pooled(tiny_vit(), k, "released")
    features = new(pictures(new))
    wanted = new.global_vector(features.tokens, features.layout)
    fresh = tiny_vit()
    add_from_records(fresh, json.loads(json.dumps([addition.to_record() for addition in new.additions])))
    saved = regista.load(new.save_pretrained(tmp_path / "model"))
    for again in (fresh, saved, regista.load(new.module), regista.load(new, image_size=56)):
        assert torch.equal(again.global_vector(features.tokens, features.layout), wanted)
        assert again.needs_regista == "its image vector is a selective pooling that its library does not know"
        assert [addition.to_record() for addition in again.additions] == [
            {"kind": "selective-pool", "k": k, "variant": "released", "eps": 1e-4}
        ]


def test_wrong_settings_are_refused() -> None:
    for k in (0, 0.0, 1.5, True):
        with pytest.raises(ValueError, match="k must be"):
            SelectiveReadOut(k)
    with pytest.raises(ValueError, match="makes no sense.*variant"):  # noqa: RUF043
        add_from_records(tiny_vit(), [{"kind": "selective-pool", "k": 1}])
