"""Exported folders: read by the library alone they give the same tokens, and the printed code runs as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from torch import nn

import regista
from regista.backbones import bare_library
from regista.backbones.base import Backbone
from regista.backbones.plain_weights import normed_tokens
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.tiny import tiny_vit
from regista.export import model_export
from regista.export.model_export import Exported, export_model, loading_snippet
from tests.backbones.conversions import HF, TIMM, noise, of_transformers, timm_backbone
from tests.backbones.dinov2_module import DinoVisionTransformer
from tests.backbones.probes import randomise

FILES = {
    "timm": ["config.json", "model.safetensors", "regista.json"],
    "transformers": ["config.json", "model.safetensors", "preprocessor_config.json", "regista.json"],
    "regista": ["config.json", "model.safetensors", "regista.json"],
    "onnx": ["model.onnx"],
}


def needed(kind: str) -> None:
    for library in {"transformers": ["transformers"], "onnx": ["onnx", "onnxruntime"]}.get(kind, []):
        pytest.importorskip(library)


def executed(code: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(compile(code, "snippet", "exec"), space)
    return space


def check_snippet(exported: Exported, backbone: Backbone) -> None:
    """Run it; its tokens are those of the backbone for the very pixels that it made."""
    space = executed(exported.snippet)
    assert exported.snippet == loading_snippet(exported)
    if exported.format == "regista":
        assert torch.equal(space["patches"], backbone(space["backbone"].preprocess(space["image"])).patches)
        return
    pixels = space["inputs"]["pixel_values"] if exported.format == "transformers" else space["pixels"]
    features = backbone(torch.as_tensor(pixels))
    tokens = normed_tokens(backbone, features.tokens) if exported.format == "transformers" else features.tokens
    for name in exported.loading.segments:
        found = torch.as_tensor(space[name])
        wanted = features.layout.take(tokens, name) if features.layout.count(name) == found.shape[1] else None
        if name == "cls" and exported.format == "onnx":
            wanted = features.cls
        if name == "patches":
            assert wanted is not None
        if wanted is not None:
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["timm", "transformers", "regista", "onnx"])
@pytest.mark.parametrize("variant", ["cls and 4 registers", "no cls, 4 registers", "dinov3 gated", "dinov2"])
def test_timm_models(variant: str, kind: Any, tmp_path: Path) -> None:
    needed(kind)
    backbone = TIMM[variant]()
    exported = export_model(backbone, tmp_path / "out", format=kind)
    assert [path.name for path in exported.paths] == FILES[kind]
    assert (exported.format, exported.folder) == (kind, tmp_path / "out")
    assert exported.max_difference <= (1e-4 if kind == "onnx" else 1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    check_snippet(exported, backbone)


@pytest.mark.parametrize("kind", ["timm", "transformers", "onnx"])
@pytest.mark.parametrize("variant", ["dinov2", "4 registers", "dinov3", "vit"])
def test_transformers_models(variant: str, kind: Any, tmp_path: Path) -> None:
    needed("transformers")
    needed(kind)
    backbone = HF[variant]()
    exported = export_model(backbone, tmp_path / "out", format=kind)
    assert exported.max_difference <= 1e-4
    check_snippet(exported, backbone)


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_hub_models(kind: Any, tmp_path: Path) -> None:
    needed(kind)
    backbone = regista.load(randomise(DinoVisionTransformer(registers=4, resize="antialiased size")))
    exported = export_model(backbone, tmp_path, format=kind)
    check_snippet(exported, backbone)
    again = regista.load(tmp_path)
    assert again.num_register_tokens == 4


@pytest.mark.parametrize("kind", ["CLIPVision", "SiglipVision"])
def test_models_that_stay_in_transformers(kind: str, tmp_path: Path) -> None:
    needed("transformers")
    backbone = of_transformers(kind, intermediate_size=128)
    exported = export_model(backbone, tmp_path / "out")
    assert exported.format == "transformers"
    check_snippet(exported, backbone)
    with pytest.raises(ValueError, match="can become a model of timm"):
        export_model(backbone, tmp_path / "timm", format="timm")
    assert not (tmp_path / "timm").exists()


def test_the_image_processor_normalises_as_the_backbone_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backbone = TIMM["cls and 4 registers"]()
    backbone.mean, backbone.std, backbone.image_size = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (84, 84)
    exported = export_model(backbone, tmp_path, format="transformers")
    processor: Any = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    picture = torch.randint(0, 256, (3, 84, 84), dtype=torch.uint8)
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, backbone.preprocess(picture[None]), rtol=1e-5, atol=1e-5)
    check_snippet(exported, backbone)


def test_auto_is_the_models_own_library() -> None:
    backbone = tiny_vit()
    chosen = model_export._chosen
    assert chosen(backbone, "auto") == "timm"
    backbone.library = "dinov2_hub"
    assert chosen(backbone, "auto") == "timm"
    backbone.library = "transformers"
    assert chosen(backbone, "auto") == "transformers"
    backbone.add(RegisterNeurons({0: [1]}, prefix_segments(backbone.layout()), 0))
    assert chosen(backbone, "auto") == "regista"


def test_what_needs_regista_goes_into_its_own_format_alone(tmp_path: Path) -> None:
    backbone = tiny_vit(num_register_tokens=1, depth=2)
    backbone.add(RegisterNeurons({0: [1]}, prefix_segments(backbone.layout()), 0))
    for kind in ("timm", "transformers", "onnx"):
        with pytest.raises(ValueError, match=r"act through a hook; it needs Regista: save_pretrained"):
            export_model(backbone, tmp_path / "out", format=kind)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    assert export_model(backbone, tmp_path / "out").format == "regista"


def test_half_precision_is_compared_in_float32(tmp_path: Path) -> None:
    backbone = tiny_vit(num_register_tokens=2, depth=2).to(dtype=torch.bfloat16)
    exported = export_model(backbone, tmp_path / "timm")
    assert exported.max_difference <= 1e-5
    assert backbone.dtype == torch.bfloat16


def test_weights_that_are_not_those_of_the_model_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = TIMM["cls and 4 registers"]()
    real = bare_library.bare_model

    def wrong(folder: Path, library: str) -> Any:
        found = real(folder, library)
        attention: Any = found.module.blocks[1].attn  # type: ignore[union-attr,index]
        q, k, v = attention.qkv.weight.data.clone().chunk(3)
        attention.qkv.weight.data = torch.cat([q, v, k])
        return found

    monkeypatch.setattr(model_export, "bare_model", wrong)
    with pytest.raises(ValueError, match=r"read back differ by .* nothing was kept"):
        export_model(backbone, tmp_path / "out", format="timm")
    assert not list(tmp_path.iterdir())


def test_a_difference_is_told_with_what_the_conversion_noted(tmp_path: Path) -> None:
    """transformers' ViT has an eps of 1e-12, timm's is 1e-6; at the tiny tokens of a new model that matters."""
    needed("transformers")
    import transformers

    options: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "image_size": 64}
    config = transformers.ViTConfig(**options, num_attention_heads=4, patch_size=16)
    new = regista.load(transformers.ViTModel(config, add_pooling_layer=False).eval())
    with pytest.raises(ValueError, match=r"differ by .* nothing was kept\. .*eps of the layer norms, 1e-12, became"):
        export_model(new, tmp_path / "vit", format="timm")
    assert not (tmp_path / "vit").exists()


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_damaged_folders_say_how_much_was_loaded(kind: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    needed(kind)
    export_model(TIMM["cls and 4 registers"](), tmp_path, format=kind)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    state = load_file(file)
    half = {key: value for key, value in state.items() if "blocks.1." not in key and "layer.1." not in key}
    save_file(half, file, metadata={"format": "pt"})
    total, lost = (len(state), len(state) - len(half))
    with pytest.raises(ValueError, match=rf"loaded {total - lost} of {total} tensors"):
        regista.load(tmp_path)
    with pytest.raises(ValueError, match=r"missing|Missing"):
        bare_library.bare_model(tmp_path, kind)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"not a whole safetensors file|cannot be loaded"):
        regista.load(tmp_path)
    file.write_bytes(whole)
    assert regista.load(tmp_path).num_register_tokens == 4


def test_folders_that_hold_something_are_left_alone(tmp_path: Path) -> None:
    backbone = tiny_vit(depth=1)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"something else.*thesis\.txt"):
        export_model(backbone, tmp_path, force=True)
    with pytest.raises(ValueError, match="is a file"):
        export_model(backbone, tmp_path / "thesis.txt")
    folder = tmp_path / "out"
    export_model(backbone, folder, card={"title": "First"})
    with pytest.raises(ValueError, match="force=True"):
        export_model(backbone, folder)
    assert "# First" in (folder / "README.md").read_text()
    again = export_model(tiny_vit(depth=2), folder, force=True)
    assert "README.md" not in [path.name for path in again.paths]
    assert regista.load(folder).depth == 2
    with pytest.raises(ValueError, match="format is one of auto"):
        export_model(backbone, folder, format="keras")  # type: ignore[arg-type]


def test_a_failure_leaves_the_old_model(tmp_path: Path) -> None:
    export_model(tiny_vit(depth=2), tmp_path / "out")
    odd = timm_backbone("vit_small_patch16_224")
    odd.vit.blocks[0].mlp.act = nn.ReLU()
    with pytest.raises(ValueError, match="ReLU"):
        export_model(odd, tmp_path / "out", force=True)
    assert regista.load(tmp_path / "out").depth == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_card_has_the_snippet_and_the_notes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    backbone = TIMM["no cls, 1 register"]()
    exported = export_model(backbone, tmp_path / "out", format="transformers", card={"license": "mit"})
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert exported.snippet.strip() in body
    assert all(note in body for note in exported.notes)
    assert any("first register" in note for note in exported.notes)
    with pytest.raises(ValueError, match="a model card has no"):
        export_model(backbone, tmp_path / "other", card={"licence": "mit"})


@pytest.mark.parametrize(
    ("kind", "source"), [("timm", "'hf-hub:me/vit'"), ("transformers", "'me/vit'"), ("regista", "'hf-hub:me/vit'")]
)
def test_snippets_for_the_hub(kind: Any, source: str, tmp_path: Path) -> None:
    needed(kind)
    exported = export_model(TIMM["cls and 4 registers"](), tmp_path / "out", format=kind)
    code = loading_snippet(exported, repo_id="me/vit")
    assert source in code
    assert str(tmp_path) not in code
    compile(code, "snippet", "exec")


@pytest.mark.parametrize("variant", ["no registers", "dinov2"])
def test_other_sizes_are_told_where_bare_timm_differs(variant: str, tmp_path: Path) -> None:
    backbone = TIMM[variant]()
    exported = export_model(backbone, tmp_path, format="timm")
    differs = not torch.equal(timm_backbone_of(tmp_path)(noise((84, 70))).tokens, backbone(noise((84, 70))).tokens)
    assert any("bare timm resizes" in note for note in exported.notes) is differs
    assert differs is (variant == "dinov2")


def timm_backbone_of(folder: Path) -> Backbone:
    return regista.load(timm.create_model(f"local-dir:{folder}", pretrained=True))


def test_bare_timm_needs_no_regista_json(tmp_path: Path) -> None:
    backbone = TIMM["swiglu"]()
    export_model(backbone, tmp_path)
    (tmp_path / "regista.json").unlink()
    bare: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(bare.forward_features(noise()), backbone(noise()).tokens)
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "vit_giant_patch14_reg4_dinov2"
    with pytest.raises(ValueError, match="library is timm or transformers"):
        bare_library.bare_model(tmp_path, "flax")
