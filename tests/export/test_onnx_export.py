"""ONNX files: named outputs, any batch, the same tokens under onnxruntime, and what is written in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import regista
from regista.backbones.base import Backbone
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.tiny import tiny_vit
from regista.export import onnx_export
from regista.export.onnx_export import export_onnx
from tests.backbones.conversions import HF, TIMM, noise, of_transformers
from tests.backbones.dinov2_module import DinoVisionTransformer
from tests.backbones.probes import randomise

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


def run(path: Path, images: torch.Tensor) -> dict[str, torch.Tensor]:
    runtime = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in runtime.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, runtime.run(names, {"pixels": images.numpy()})), strict=True))


def compare(path: Path, backbone: Backbone, images: torch.Tensor) -> dict[str, torch.Tensor]:
    found, features = run(path, images), backbone(images)
    wanted = {"cls": features.cls, "registers": features.registers, "patches": features.patches}
    wanted = {name: value for name, value in wanted.items() if value is not None and value.numel()}
    assert set(found) == set(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.parametrize("variant", ["cls and 4 registers", "no cls, 1 register", "swiglu", "dinov3 gated"])
@pytest.mark.parametrize("size", [(56, 56), (84, 70)])
def test_timm(variant: str, size: tuple[int, int], tmp_path: Path) -> None:
    backbone = TIMM[variant]()
    exported = export_onnx(backbone, tmp_path / "model.onnx", image_size=size)
    found = compare(exported.path, backbone, noise(size, 5))
    assert exported.outputs == {name: (1, *value.shape[1:]) for name, value in found.items()}
    assert 0 < exported.max_difference <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    [one], three = run(exported.path, noise(size, 1))["patches"], run(exported.path, noise(size, 3))["patches"]
    assert one.shape == three.shape[1:]


def test_a_batch_of_three_equals_three_of_one(tmp_path: Path) -> None:
    export_onnx(tiny_vit(num_register_tokens=2, depth=2), tmp_path / "a.onnx", image_size=28)
    images = noise((28, 28), 3)
    together = run(tmp_path / "a.onnx", images)
    for name, value in together.items():
        alone = torch.cat([run(tmp_path / "a.onnx", image[None])[name] for image in images])
        torch.testing.assert_close(value, alone, rtol=1e-5, atol=1e-5)


def of_hub() -> Backbone:
    return regista.load(randomise(DinoVisionTransformer(registers=4, resize="antialiased size")))


@pytest.mark.parametrize(
    "make",
    [
        HF["dinov2"],
        HF["2 registers, swiglu"],
        HF["dinov3"],
        of_hub,
        lambda: of_transformers("SiglipVision", intermediate_size=128),
        lambda: of_transformers("CLIPVision", intermediate_size=128),
    ],
)
def test_other_libraries(make: Any, tmp_path: Path) -> None:
    if make is not of_hub:
        pytest.importorskip("transformers")
    backbone = make()
    export_onnx(backbone, tmp_path / "model.onnx", image_size=(84, 70))
    compare(tmp_path / "model.onnx", backbone, noise((84, 70)))


def test_what_is_written_in_the_file(tmp_path: Path) -> None:
    backbone = tiny_vit(num_register_tokens=3, depth=1)
    backbone.mean, backbone.std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    export_onnx(backbone, tmp_path / "model.onnx", image_size=(28, 42), batch=2, opset=17)
    model = onnx.load(tmp_path / "model.onnx")
    props = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert props["patch_size"] == 14
    assert (props["mean"], props["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (props["image_size"], props["grid_size"]) == ([28, 42], [2, 3])
    assert props["layout"] == {"cls": 1, "registers": 3, "patches": 6}
    [pixels] = model.graph.input
    assert [axis.dim_value for axis in pixels.type.tensor_type.shape.dim] == [2, 3, 28, 42]
    assert [entry.version for entry in model.opset_import if not entry.domain] == [17]


def test_large_weights_lie_in_one_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "ONE_FILE", 1000)
    backbone = tiny_vit(depth=1)
    export_onnx(backbone, tmp_path / "model.onnx", image_size=28)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    compare(tmp_path / "model.onnx", backbone, noise((28, 28)))


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    backbone = tiny_vit(depth=1).to(dtype=torch.bfloat16)
    backbone.module.train()
    exported = export_onnx(backbone, tmp_path / "model.onnx", image_size=28)
    assert backbone.dtype == torch.bfloat16
    assert all(child.training for child in backbone.module.modules())
    assert exported.image_size == (28, 28)


class Random(nn.Module):
    """Stands for a model whose file does not compute what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if torch.jit.is_tracing() else x


def test_a_wrong_file_is_not_kept(tmp_path: Path) -> None:
    backbone = tiny_vit(depth=1)
    backbone.vit.norm_pre = Random()
    with pytest.raises(ValueError, match=r"differs by .* wanted 1e-04"):
        export_onnx(backbone, tmp_path / "model.onnx", image_size=28)
    assert not list(tmp_path.iterdir())


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_vit(depth=1)
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"ends in \.onnx"):
        export_onnx(backbone, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="not divisible by the patch size 14"):
        export_onnx(backbone, path, image_size=30)
    for batch in (0, "all", True):
        with pytest.raises(ValueError, match='or "dynamic"'):
            export_onnx(backbone, path, batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be exported by torch as ONNX"):
        export_onnx(backbone, path, image_size=28, opset=3)
    path.write_text("mine")
    with pytest.raises(ValueError, match="force=True"):
        export_onnx(backbone, path)
    assert path.read_text() == "mine"
    assert export_onnx(backbone, path, image_size=28, force=True).path == path
    backbone.add(RegisterNeurons({0: [1]}, prefix_segments(backbone.layout()), 0))
    with pytest.raises(ValueError, match="act through a hook"):
        export_onnx(backbone, path, force=True)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"pip install 'regista\[onnx\]'"):
        export_onnx(tiny_vit(depth=1), tmp_path / "b.onnx")


def test_distillation_tokens_have_a_name(tmp_path: Path) -> None:
    module = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, embed_dim=64, depth=1, num_heads=4)
    backbone = regista.load(randomise(module))
    export_onnx(backbone, tmp_path / "model.onnx")
    assert set(run(tmp_path / "model.onnx", noise((32, 32)))) == {"cls", "patches", "extra"}
