"""Code that loads an exported model without Regista; tests run it as it is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMATS = ("timm", "transformers", "regista", "onnx")

_TIMM = """\
import timm
import torch
from PIL import Image

model = timm.create_model({source!r}, pretrained=True).eval()
settings = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**settings, is_training=False)
image = Image.new("RGB", (640, 480), "white")  # yours: Image.open(path).convert("RGB")
pixels = transform(image).unsqueeze(0)  # (1, 3, H, W)
with torch.inference_mode():
    tokens = {expression}  # (1, N, {width})
{parts}
"""
_TRANSFORMERS = """\
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained({source!r})
model = AutoModel.from_pretrained({source!r}).eval()
image = Image.new("RGB", (640, 480), "white")  # yours: Image.open(path).convert("RGB")
inputs = processor(images=image, return_tensors="pt")
with torch.inference_mode():
    tokens = {expression}  # (1, N, {width})
{parts}
"""
_REGISTA = """\
import regista
from PIL import Image

backbone = regista.load({source!r})
image = Image.new("RGB", (640, 480), "white")  # yours: Image.open(path)
features = backbone(backbone.preprocess(image))
cls = features.cls  # (1, {width}), None without a CLS token
registers = features.registers  # (1, R, {width})
patches = features.patches  # (1, P, {width}), row by row
"""
_ONNX = """\
import json

import numpy as np
import onnxruntime
from PIL import Image

runtime = onnxruntime.InferenceSession({source!r}, providers=["CPUExecutionProvider"])
facts = {{key: json.loads(value) for key, value in runtime.get_modelmeta().custom_metadata_map.items()}}
height, width = facts["image_size"]
image = Image.new("RGB", (640, 480), "white")  # yours: Image.open(path).convert("RGB")
image = image.resize((width, height), Image.Resampling.BICUBIC)
pixels = (np.asarray(image, np.float32) / 255 - np.array(facts["mean"])) / np.array(facts["std"])
pixels = pixels.transpose(2, 0, 1)[np.newaxis].astype(np.float32)  # (1, 3, H, W)
{names} = runtime.run({named}, {{"pixels": pixels}})
"""
_TEMPLATES = {"timm": _TIMM, "transformers": _TRANSFORMERS, "regista": _REGISTA, "onnx": _ONNX}


@dataclass(frozen=True)
class Loading:
    """What it takes to write the code.

    Attributes:
        format: One of ``FORMATS``.
        segments: {kind of token: how many}, in the model's own order; patches last.
        width: D.
        expression: In timm and transformers, the tokens out of ``model``.
        library: Whose files a folder of the format "regista" holds.
    """

    format: str
    segments: Mapping[str, int] = field(default_factory=dict)
    width: int = 0
    expression: str = ""
    library: str = ""


def loading_snippet(exported: Any, *, repo_id: str | None = None) -> str:
    """Python that loads an exported model and takes its tokens apart into ``cls``, ``registers`` and ``patches``.

    Args:
        exported: What ``export_model`` returned.
        repo_id: "org/name" on the Hugging Face hub: the code loads from there instead of the folder.
    """
    return snippet_for(exported.loading, exported.folder, repo_id)


def snippet_for(loading: Loading, folder: Path, repo_id: str | None = None) -> str:
    """The code for a folder, or a repository of the hub."""
    names = [name for name in ("cls", "registers", "patches", "extra") if loading.segments.get(name)]
    return _TEMPLATES[loading.format].format(
        source=_source(loading, str(folder), repo_id),
        width=loading.width,
        expression=loading.expression,
        parts=_parts(loading.segments),
        names=", ".join(names),
        named=names,
    )


def _source(loading: Loading, folder: str, repo_id: str | None) -> str:
    if loading.format == "onnx":
        return "model.onnx" if repo_id else f"{folder}/model.onnx"
    if repo_id is None:
        return f"local-dir:{folder}" if loading.format == "timm" else folder
    if "timm" in (loading.format, loading.library):
        return f"hf-hub:{repo_id}"
    return f"hf/{repo_id}" if loading.format == "regista" else repo_id


def _parts(segments: Mapping[str, int]) -> str:
    """The line that takes the tokens apart: its numbers hold at every image size."""
    before = {name: count for name, count in segments.items() if name != "patches"}
    total = sum(before.values())
    if not before:
        return "patches = tokens  # row by row"
    counts = ", ".join(str(count) for count in before.values())
    names = ", ".join([*before, "patches"])
    return f"{names} = tokens.split([{counts}, tokens.shape[1] - {total}], dim=1)  # patches row by row"
