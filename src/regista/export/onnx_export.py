"""ONNX files whose outputs have names: ``cls``, ``registers`` and ``patches`` instead of one row of tokens."""

from __future__ import annotations

import copy
import json
import secrets
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import regista
from regista.backbones.base import Backbone
from regista.backbones.plain_weights import check_plain_weights
from regista.backbones.timm_conversion import as_timm_backbone
from regista.data.fit import checked_size
from regista.results.writing import in_words
from regista.tokens import TokenLayout

OPSET = 18
TOLERANCE = 1e-4  # other kernels for exp, erf and matrix products, through every block
INPUT = "pixels"
ONE_FILE = 1_900_000_000  # bytes of weights; protobuf holds 2 GB, so more go into a second file


@dataclass(frozen=True)
class OnnxExport:
    """What was written.

    Attributes:
        path: Of the model; the weights of large ones lie beside it, in ``path`` + ".data".
        outputs: {name: its shape for one image}: ``cls`` (1, D), ``registers`` (1, R, D), ``patches`` (1, P, D).
        image_size: (height, width), fixed.
        max_difference: The largest difference between an output under onnxruntime and the model's own, over the
            largest value of that output or one, whichever is more.
        notes: What was converted on the way.
    """

    path: Path
    outputs: dict[str, tuple[int, ...]]
    image_size: tuple[int, int]
    max_difference: float
    notes: tuple[str, ...]


def export_onnx(
    backbone: Backbone,
    path: str | Path,
    *,
    image_size: int | Sequence[int] | None = None,
    batch: int | Literal["dynamic"] = "dynamic",
    opset: int = OPSET,
    force: bool = False,
) -> OnnxExport:
    """Write a backbone as ONNX in float32, and run it under onnxruntime before it is called done.

    The input is ``pixels`` (B, 3, H, W), normalised. The patch size, mean, std, image size and layout are in the
    model's metadata, each as JSON. Models of transformers and torch.hub that timm can hold are exported through timm.

    Args:
        path: Ends in .onnx.
        image_size: (height, width), or one number for both; the backbone's by default.
        batch: A fixed number of images, or "dynamic".
        opset: Of the ONNX operators.
        force: Replace a file that is there.

    Raises:
        ValueError: without onnx and onnxruntime; for a backbone that is more than its weights, or that torch cannot
            export; and if the tokens differ by more than 1e-4 (relative to the largest, at least one). Nothing is
            left of it then.
    """
    check_plain_weights(backbone, "an ONNX file")
    path = Path(path).expanduser()
    _check_arguments(path, batch, force)
    for library in ("onnx", "onnxruntime"):
        _needed(library)
    size = checked_size(image_size) or backbone.image_size
    layout = backbone.layout(size)
    reference = _on_cpu(backbone)
    source, notes = _traceable(reference)
    beside = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        beside.mkdir(parents=True)
        file = beside / path.name
        _trace(source, layout, file, batch, opset)
        _finish(file, _metadata(backbone, layout))
        difference, outputs = _checked(file, reference, layout, (1, 3) if batch == "dynamic" else (batch,))
        for written in sorted(beside.iterdir(), key=lambda found: found.name == path.name):  # the model itself last
            written.replace(path.parent / written.name)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {in_words(error)}; what was there before is unchanged") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return OnnxExport(path, outputs, size, difference, tuple(notes))


class _Named(nn.Module):
    """The tokens of a backbone, taken apart."""

    def __init__(self, backbone: Backbone, layout: TokenLayout) -> None:
        super().__init__()
        self.inner = backbone.module
        self.backbone = backbone
        self.layout = layout

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> one tensor for each segment."""
        return tuple(_by_name(self.backbone.forward_tokens(pixels), self.layout).values())


def _by_name(tokens: Tensor, layout: TokenLayout) -> dict[str, Tensor]:
    parts = {name: part for name, part in layout.split(tokens).items() if layout.count(name)}
    if "cls" in parts:
        parts["cls"] = parts["cls"].squeeze(-2)
    return parts


def _check_arguments(path: Path, batch: int | str, force: bool) -> None:
    if path.suffix != ".onnx":
        raise ValueError(f"{path}: the name of an ONNX file ends in .onnx")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; force=True replaces it")
    if batch != "dynamic" and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise ValueError(f'batch is a number of images from 1 or "dynamic", got {batch!r}')


def _needed(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        advice = "pip install 'regista[onnx]'"
        raise ValueError(f"ONNX files need {library}, which cannot be imported ({error}); {advice}") from error


def _on_cpu(backbone: Backbone) -> Backbone:
    """In float32 on the CPU: itself, or a copy."""
    if backbone.device.type == "cpu" and all(x.dtype == torch.float32 for x in backbone.module.parameters()):
        return backbone
    return copy.deepcopy(backbone).to("cpu", torch.float32)


def _traceable(backbone: Backbone) -> tuple[Backbone, list[str]]:
    """Through timm where it can be, whose position table is resized before and not inside the exported model."""
    if backbone.library == "timm":
        return backbone, []
    try:
        source = as_timm_backbone(backbone)
    except ValueError:  # exported as it is, and checked like all others
        return backbone, []
    return source, [note for note in source.notes if note not in backbone.notes]


def _trace(backbone: Backbone, layout: TokenLayout, file: Path, batch: int | str, opset: int) -> None:
    names = [name for name, _ in layout.segments]
    names = [name for name in ("cls", "registers", "patches", "extra") if name in names]
    images = torch.zeros(2 if batch == "dynamic" else int(batch), 3, *layout.image_size)
    options: dict[str, Any] = {"input_names": [INPUT], "output_names": names, "opset_version": opset, "dynamo": False}
    if batch == "dynamic":
        options["dynamic_axes"] = {name: {0: "batch"} for name in (INPUT, *names)}
    module = _Named(backbone, layout)
    modes = [(child, child.training) for child in module.modules()]
    try:
        with warnings.catch_warnings(), torch.no_grad(), backbone.prepared(layout.image_size):
            warnings.simplefilter("ignore")  # shapes become constants, which is what a fixed image size means
            torch.onnx.export(module.eval(), (images,), str(file), **options)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{backbone.name} cannot be exported by torch as ONNX (opset {opset}): {text}") from error
    finally:
        for child, training in modes:
            child.training = training


def _metadata(backbone: Backbone, layout: TokenLayout) -> dict[str, str]:
    values = {
        "model": backbone.name,
        "patch_size": backbone.patch_size,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "image_size": list(layout.image_size),
        "grid_size": list(layout.grid_size),
        "layout": dict(layout.segments),
        "regista": regista.__version__,
    }
    return {key: json.dumps(value) for key, value in values.items()}


def _finish(file: Path, metadata: dict[str, str]) -> None:
    """Write the metadata into the model, and weights that no single file can hold into one beside it."""
    onnx = _needed("onnx")
    model = onnx.load(str(file))
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > ONE_FILE
    for other in [found for found in file.parent.iterdir() if found != file or large]:
        other.unlink()
    options = {"save_as_external_data": True, "location": f"{file.name}.data"} if large else {}
    onnx.save_model(model, str(file), **options)
    onnx.checker.check_model(str(file))


@torch.no_grad()
def _checked(
    file: Path, backbone: Backbone, layout: TokenLayout, batches: Sequence[int]
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """The largest difference under onnxruntime, and the outputs' shapes for one image.

    Raises:
        ValueError: if it is too large, or the file does not run.
    """
    runtime = _needed("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    largest, shapes = 0.0, dict[str, tuple[int, ...]]()
    for number, count in enumerate(batches):
        noise = torch.Generator().manual_seed(number)
        images = torch.randn(count, 3, *layout.image_size, generator=noise)
        wanted = _by_name(backbone(images).tokens, layout)
        found = runtime.run(list(wanted), {INPUT: images.numpy()})
        for name, value in zip(wanted, found, strict=True):
            got, own = torch.from_numpy(value), wanted[name]
            if got.shape != own.shape:
                raise ValueError(f"{backbone.name}: {name} is {tuple(got.shape)} in ONNX, wanted {tuple(own.shape)}")
            difference = float((got - own).abs().max()) / max(1.0, float(own.abs().max()))
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"{backbone.name}: {name} differs by {difference:.1e} under onnxruntime, wanted {TOLERANCE:.0e}; "
                    "the file was not kept"
                )
            largest = max(largest, difference)
            shapes[name] = (1, *got.shape[1:])
    return largest, shapes
