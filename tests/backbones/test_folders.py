"""Folders that ``regista.load`` reads, and what is wrong with those it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

import regista
from regista.backbones.tiny import tiny_vit
from tests.backbones.probes import randomise


def dinov2() -> Any:
    options: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    return randomise(transformers.Dinov2Model(transformers.Dinov2Config(**options, patch_size=14)))


def test_bad_records_are_refused(tmp_path: Path) -> None:
    tiny_vit(num_register_tokens=2).save_pretrained(tmp_path)
    path = tmp_path / "regista.json"
    record = json.loads(path.read_text())
    for change, wanted in (
        ({"num_register_tokens": 3}, "says 3 registers, the weights have 2"),
        ({"format_version": 99}, "update Regista"),
        ({"format_version": None}, "format_version"),
        ({"positions": {"mode": "bicubic", "offse": 1}}, "offse"),
        ({"image_size": [1]}, "cannot be used"),
        ({"planted": {"version": 1}}, "not the record of planted outliers"),
    ):
        path.write_text(json.dumps({**record, **change}))
        with pytest.raises(ValueError, match=wanted):
            regista.load(tmp_path)
    path.write_text(json.dumps({key: value for key, value in record.items() if key != "mean"}))
    with pytest.raises(ValueError, match=r"lacks \['mean'\]"):
        regista.load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"regista\.json cannot be read"):
        regista.load(tmp_path)
    path.write_text(json.dumps(record))
    assert regista.load(tmp_path, image_size=28).image_size == (28, 28)


PLAIN = '{"architecture": "vit_tiny_patch16_224"'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "wanted an object, got a list"),
        ("{}", "has neither"),
        ('{"architecture": "vit_tiny_patch16_22"}', "did you mean vit_tiny_patch16_224"),
        (PLAIN + ', "pretrained_cfg": {}, "model_args": {"dept": 2}}', "timm cannot build this model.*dept"),
        (PLAIN + "}", r"loaded \d+ of \d+ tensors"),
        ('{"architecture": "resnet18"}', "ResNet is not a timm VisionTransformer or Eva"),
        ('{"model_type": "dinov2"}', r"cannot be loaded|loaded \d+ of \d+ tensors"),
        ('{"model_type": "resnet"}', "ResNetModel is not one of"),
        ('{"model_type": "nonsense"}', "cannot be loaded"),
    ],
)
def test_bad_configurations_are_refused(text: str, wanted: str, tmp_path: Path) -> None:
    tiny_vit(embed_dim=32).save_pretrained(tmp_path)
    (tmp_path / "regista.json").unlink()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=wanted) as caught:
        regista.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model: wanted a config\.json .* found nothing"):
        regista.load(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"found notes\.txt; for bare weights say the architecture"):
        regista.load(tmp_path)
    (tmp_path / "config.json").write_text(PLAIN + "}")
    with pytest.raises(ValueError, match=r"wanted one weight file .* found none"):
        regista.load(tmp_path)


def test_weights_that_do_not_fit_their_folder_are_refused(tmp_path: Path) -> None:
    tiny_vit().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["norm.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"loaded 53 of 54 tensors \(98 %\); missing 1: norm\.bias"):
        regista.load(tmp_path)
    assert "missing 1: norm.bias" in regista.load(tmp_path, allow_partial=True).notes[0]
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        regista.load(tmp_path)


def test_transformers_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    regista.load(dinov2()).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.norm2.weight"
    save_file({key: value for key, value in state.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"loaded \d+ of \d+ tensors \(9\d %\); missing 1: {name}"):
        regista.load(tmp_path)
    assert name in regista.load(tmp_path, allow_partial=True).notes[0]
    state[name].view(-1)[0] = float("inf")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 of 64 values of '{name}' are NaN or infinite"):
        regista.load(tmp_path)
