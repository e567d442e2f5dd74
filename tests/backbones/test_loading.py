"""Specs: what each loads, and one clear sentence for each that cannot be loaded."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file

import regista
from regista.backbones import hub_access, loading, sources
from regista.backbones.base import Backbone
from regista.backbones.positions import TRANSFORMERS
from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import tiny_vit
from regista.registry import Registry
from tests.backbones.probes import close, pictures, randomise


def test_tiny_is_the_same_every_time() -> None:
    first, second = regista.load("tiny"), regista.load("tiny", image_size=(28, 42))
    assert second.image_size == (28, 42)
    assert torch.equal(first(pictures(first)).tokens, second(pictures(first)).tokens)
    assert "random weights" in first.notes[0]


@pytest.mark.weights
def test_demo() -> None:
    backbone = regista.load("demo")
    assert isinstance(backbone, TimmBackbone)
    assert backbone.positions == TRANSFORMERS
    assert backbone.image_size == (518, 518)
    assert backbone.name == "demo"
    assert backbone.notes == ["demo: loaded all 174 tensors"]
    assert regista.load("demo", image_size=224).image_size == (224, 224)


def test_tiny_planted() -> None:
    backbone = regista.load("tiny-planted", image_size=(70, 84))
    assert (backbone.name, backbone.image_size) == ("tiny-planted", (70, 84))
    assert backbone.planted is not None
    images = torch.nn.functional.interpolate(pictures(backbone, 2, (5, 5)), (112, 112), mode="bilinear")
    mask = backbone.planted.mask(images)
    assert mask.shape == (2, 8, 8)
    assert 0 < mask.float().mean() < 0.1
    again = regista.load("tiny-planted")
    assert torch.equal(again(images).tokens, backbone(images).tokens)
    assert not torch.equal(regista.load("tiny")(images).tokens, backbone(images).tokens)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "kind"), [("demo-planted", "content"), ("demo-planted-position", "position")])
def test_demo_planted(spec: str, kind: str) -> None:
    backbone = regista.load(spec, image_size=224)
    assert (backbone.name, backbone.image_size) == (spec, (224, 224))
    assert backbone.planted is not None
    assert backbone.planted.kind == kind
    assert backbone.positions == TRANSFORMERS  # type: ignore[attr-defined]


def test_a_backbone_is_returned() -> None:
    backbone = tiny_vit()
    assert regista.load(backbone) is backbone
    other = regista.load(backbone, image_size=28)
    assert other.image_size == (28, 28)
    assert other.module is backbone.module
    assert backbone.image_size == (112, 112)


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("tinny", r"unknown model 'tinny': .*did you mean 'tiny'\?.*Known: demo, .*hf-hub:ORG/NAME.*a folder"),
        ("demo-plantd", "did you mean 'demo-planted'"),
        ("tim/vit_small_patch14_dinov2", "did you mean 'timm'"),
        ("vit_small_patch14_dinov2", r"did you mean timm/vit_small_patch14_dinov2\?"),
        ("facebook/dinov2-small", "hf/facebook/dinov2-small"),
        ("", "unknown model ''"),
        ("no/such/folder/at/all", "no such folder"),
        ("tiny/x", "'tiny' takes nothing behind its name, got 'x'"),
        ("timm/", "timm has no model ''"),
        ("timm/vit_smal_patch14_dinov2", "did you mean vit_small_patch14_dinov2 or"),
        ("timm/vit_small_patch14_dinov2.lvd142", "for this architecture it has vit_small_patch14_dinov2.lvd142m"),
        (
            "timm/vit_base_patch16_reg4_gap_256",
            "no pretrained weights .*give a file: timm/vit_base_patch16_reg4_gap_256@FILE",
        ),
        ("timm/resnet50.a1_in1k", "ResNet is not a timm VisionTransformer or Eva"),
        ("timm/naflexvit_base_patch16_gap", "NaFlexVit is not"),
        ("timm/vit_tiny_patch16_224@no/file.pth", r"there is no weight file no/file\.pth"),
        ("timm/vit_small_patch14_dinov2", "not in the local cache .*give a file of weights"),
        ("hf-hub:timm/vit_small_patch14_dinov2.lvd142m", "not in the local cache"),
        ("hf/facebook/dinov2-small", "not in the local cache"),
        ("open_clip/ViT-B-33/x", r"did you mean ViT-B-32\b"),
        ("open_clip/ViT-B-32/openay", r"has no weights 'openay' \(did you mean openai\?\).*and \d+ more"),
        ("open_clip/ViT-B-32", "has no weights ''"),
        ("open_clip/ViT-B-32/openai", "not in the local cache"),
        ("open_clip/ViT-B-32-quickgelu/laion2b_e16", "quickgelu"),
    ],
)
def test_specs_that_cannot_be_loaded(spec: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted) as caught:
        regista.load(spec)
    assert "\n" not in str(caught.value)


def test_a_file_needs_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"say which architecture they are for: timm/NAME@.*w\.pth"):
        regista.load(str(tmp_path / "w.pth"))


@pytest.mark.parametrize("model", [3, None, ["tiny"], {"a": 1}])
def test_other_things_are_no_models(model: Any) -> None:
    with pytest.raises(ValueError, match=f"got a {type(model).__name__}"):
        regista.load(model)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"device": "foo"}, "device 'foo' is unknown"),
        ({"device": "cuda:99"}, "this machine has \\d+ CUDA devices"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; one of float32"),
        ({"dtype": torch.int8}, "dtype is one of float32"),
        ({"image_size": 0}, "image_size is"),
        ({"image_size": (14, -14)}, "image_size is"),
        ({"image_size": (14, 14, 3)}, "image_size is"),
        ({"image_size": (14.5, 14)}, "image_size is"),
        ({"image_size": True}, "image_size is"),
        ({"image_size": "big"}, "image_size is"),
    ],
)
def test_bad_options(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        regista.load("tiny", **options)


def test_mps_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'mps'"):
        regista.load("tiny", device="mps")


@pytest.mark.parametrize(("cuda", "mps", "wanted"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_the_best_device(cuda: bool, mps: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert loading.checked_device("auto").type == wanted


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_precisions(dtype: Any) -> None:
    backbone = regista.load("tiny", dtype=dtype, device="auto")
    assert backbone.dtype == torch.bfloat16
    assert backbone(pictures(backbone)).tokens.dtype == torch.bfloat16
    assert regista.load("tiny").dtype == torch.float32


# Other packages -------------------------------------------------------------------------------


def load_mine(rest: str, *, image_size: tuple[int, int] | None, allow_partial: bool) -> Backbone:
    """What another package would offer."""
    backbone = tiny_vit(image_size=image_size, num_register_tokens=int(rest))
    backbone.name = f"mine {allow_partial}"
    return backbone


def test_other_packages_join_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = Registry("model spec", {"tiny": "regista.backbones.own_models:from_tiny"}, "regista.backbones")
    point = EntryPoint("mine", f"{__name__}:load_mine", "regista.backbones")
    monkeypatch.setitem(kinds.__dict__, "_third_parties", {"mine": [point]})
    monkeypatch.setattr(loading, "KINDS", kinds)
    for spec in ("mine/3", "mine:3"):
        backbone = regista.load(spec, image_size=28, allow_partial=True)
        assert (backbone.num_register_tokens, backbone.image_size, backbone.name) == (3, (28, 28), "mine True")
    assert loading.KINDS.entry_point_group == "regista.backbones"


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        if name in ("transformers", "open_clip"):
            raise ImportError(f"No module named {name!r}")
        return importlib.import_module(name)

    monkeypatch.setattr(sources, "import_module", missing)
    for spec, extra in (("hf/org/name", "transformers"), ("open_clip/ViT-B-32/openai", "open-clip")):
        with pytest.raises(ValueError, match=rf"pip install 'regista\[{extra}\]'"):
            regista.load(spec)


# The hub, from a cache as its client keeps it --------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A hub cache of our own; gives the folder of a repository's snapshot."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def snapshot(repository: str) -> Path:
        root = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        folder = root / "snapshots" / ("a" * 40)
        folder.parent.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("a" * 40)
        return folder

    return snapshot


def test_a_cached_repository_of_timm(cache: Callable[[str], Path]) -> None:
    saved = tiny_vit(num_register_tokens=2)
    saved.positions, saved.image_size = TRANSFORMERS, (140, 140)
    folder = cache("org/name")
    saved.save_pretrained(folder)
    backbone = regista.load("hf-hub:org/name")
    assert isinstance(backbone, TimmBackbone)
    assert (backbone.positions, backbone.image_size, backbone.num_register_tokens) == (TRANSFORMERS, (140, 140), 2)
    assert torch.equal(backbone(pictures(saved)).tokens, saved(pictures(saved)).tokens)
    (folder / "regista.json").unlink()
    assert regista.load("hf-hub:org/name").image_size == (112, 112)
    assert regista.load("hf-hub:org/name", image_size=28).image_size == (28, 28)


def test_a_cached_pretrained_model_of_timm(cache: Callable[[str], Path]) -> None:
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    module: Any = randomise(timm.create_model("vit_tiny_patch16_224", pretrained=False))
    folder = cache(f"timm/{name}")
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    backbone = regista.load(f"timm/{name}")
    images = pictures(backbone, 1, (224, 224))
    with torch.no_grad():
        assert torch.equal(backbone(images).tokens, module.forward_features(images))
    assert backbone.notes == [f"timm/{name}: loaded all 152 tensors"]
    save_file(
        {key: value for key, value in module.state_dict().items() if key != "norm.bias"}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=rf"timm/{name} cannot be loaded: .*norm\.bias"):
        regista.load(f"timm/{name}")


def test_a_cached_repository_of_transformers(cache: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    model: Any = randomise(transformers.Dinov2Model(transformers.Dinov2Config(**options, patch_size=14)))
    folder = cache("org/name")
    model.half().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "BitImageProcessor", "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3})
    )
    backbone = regista.load("hf/org/name")
    assert backbone.mean == (0.1, 0.2, 0.3)
    assert backbone.dtype == torch.float32
    images = pictures(backbone, 1, (56, 56))
    with torch.no_grad():
        close(backbone(images).tokens, model.float()(images).last_hidden_state, 1e-5)


def test_a_tensor_of_another_shape_is_counted_and_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    transformers.Dinov2Model(transformers.Dinov2Config(**options, patch_size=14)).save_pretrained(tmp_path)
    state, key = load_file(tmp_path / "model.safetensors"), "encoder.layer.0.mlp.fc1.weight"
    state[key] = state[key].narrow(0, 0, 255).clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"loaded 42 of 43 .*another shape 1: {key} \(255, 64\), wanted \(256, 64\)"):
        regista.load(tmp_path)
    assert "loaded 42 of 43" in regista.load(tmp_path, allow_partial=True).notes[0]


# Without network ------------------------------------------------------------------------------


def test_a_dead_hub_is_asked_once_and_put_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "hub_answers", lambda endpoint: bool(asked.append(endpoint)))
    with pytest.raises(ValueError, match=r"timm/vit_small_patch14_dinov2 is not in the local cache .*\(no network\)"):
        regista.load("timm/vit_small_patch14_dinov2")  # its client would try again and again for half a minute
    assert asked == [constants.ENDPOINT]
    assert constants.HF_HUB_OFFLINE is False


def test_a_hub_that_answers_is_used_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "hub_answers", lambda _endpoint: True)

    def fetch() -> None:
        with hub_access.reaching_hub("x", "; or this"):
            assert constants.HF_HUB_OFFLINE is False
            raise OSError("gone\nand more")

    with pytest.raises(ValueError, match="x cannot be loaded: gone and more; or this"):
        fetch()


def test_a_folder_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def fail(_endpoint: str) -> bool:
        raise AssertionError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "hub_answers", fail)
    with hub_access.reaching_hub("x", local=True):
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is False


def test_nobody_answers_at_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    close_session()
    assert not hub_access.hub_answers("http://127.0.0.1:9")
    close_session()


def test_loading_needs_no_library_but_its_own() -> None:
    import subprocess

    code = "import sys, regista; regista.load('tiny'); print(*({'transformers', 'open_clip'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
