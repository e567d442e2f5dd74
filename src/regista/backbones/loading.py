"""``regista.load``: from a name, a folder, a file or a live module to a backbone."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn

from regista.backbones.base import Backbone
from regista.backbones.live import from_module
from regista.data.fit import checked_size
from regista.registry import Registry

# What a spec begins with, up to the first "/" or ":". Each is called as
# ``loader(rest, *, image_size, allow_partial)``; other packages join under this entry point group.
KINDS = Registry(
    "model spec",
    {
        "timm": "regista.backbones.sources:from_timm_name",
        "hf-hub": "regista.backbones.sources:from_timm_hub",
        "hf": "regista.backbones.sources:from_transformers_hub",
        "open_clip": "regista.backbones.sources:from_open_clip_name",
        "tiny": "regista.backbones.own_models:from_tiny",
        "tiny-planted": "regista.backbones.own_models:from_tiny_planted",
        "demo": "regista.backbones.own_models:from_demo",
        "demo-planted": "regista.backbones.own_models:from_demo_planted",
        "demo-planted-position": "regista.backbones.own_models:from_demo_planted_position",
    },
    entry_point_group="regista.backbones",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def load(
    spec: str | Path | nn.Module | Backbone,
    *,
    image_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    allow_partial: bool = False,
) -> Backbone:
    """Load a ViT from any of the libraries, ready to be looked into.

    Args:
        spec: "timm/NAME" with pretrained weights · "timm/NAME@FILE" with those of a file ·
            "hf-hub:org/name" (timm's hub format) · "hf/org/name" (transformers) ·
            "open_clip/ARCH/TAG" or "open_clip/ARCH@FILE" · a folder saved by Regista, timm or
            transformers · "tiny", "tiny-planted", "demo", "demo-planted",
            "demo-planted-position" · a live module of timm, transformers, open_clip,
            torchvision or torch.hub's DINOv2 · a backbone, which is returned (for another
            ``image_size`` a second one around the same module).
        image_size: (height, width), or one number for both, that ``preprocess`` brings files
            and PIL images to; the model's own by default. Any size can be forwarded.
        device: "cpu", "cuda", "mps" ..., or "auto" for the best there is. A live module stays
            where it is unless another device than "cpu" is named.
        dtype: "float32", "bfloat16", "float16", or a ``torch.dtype``. By default float32 for
            what is loaded, the one that was saved for Regista's own folders, and a live module's
            own.
        allow_partial: Accept weights that fill only a part of the model; the notes say which.

    Returns:
        A backbone in evaluation mode. ``backbone.notes`` tells how much was loaded and what was
        converted. A live module is used as it is, without a copy.

    Raises:
        ValueError: for an unknown spec (with the nearest spellings), weights that are not there,
            cannot be read or do not fit, and a device that is not there. Weights are never
            random unless "tiny" is asked for.
    """
    where, precision, size = checked_device(device), checked_dtype(dtype), checked_size(image_size)
    if isinstance(spec, Backbone):
        backbone = spec if size in (None, spec.image_size) else copy.copy(spec)
        backbone.image_size = size or spec.image_size
    elif isinstance(spec, nn.Module):
        backbone = from_module(spec, image_size=size)
    elif isinstance(spec, (str, Path)):
        backbone = _from_spec(spec, size, allow_partial)
        backbone.module.eval()
    else:
        raise ValueError(f"a model is a spec, a folder, a module or a backbone, got a {type(spec).__name__}")
    moved = isinstance(spec, (str, Path)) or device != "cpu"
    return backbone.to(where if moved else None, precision)


def _from_spec(spec: str | Path, image_size: tuple[int, int] | None, allow_partial: bool) -> Backbone:
    text = str(spec)
    kind, rest = _split(text)
    if isinstance(spec, str) and kind in KINDS:
        backbone: Backbone = KINDS.get(kind)(rest, image_size=image_size, allow_partial=allow_partial)
        return backbone
    path = Path(text).expanduser()
    if text and path.is_dir():
        from regista.backbones.folders import from_folder

        return from_folder(path, image_size=image_size, allow_partial=allow_partial)
    if text and path.is_file():
        raise ValueError(f"{text} is a file of weights; say which architecture they are for: timm/NAME@{text}")
    raise ValueError(f"unknown model {text!r}: no such spec and no such folder{_advice(text)}. {_listing()}")


def _split(spec: str) -> tuple[str, str]:
    """What a spec begins with, and the rest: "timm/x@y" -> "timm", "x@y"."""
    found = re.match(r"^([^/:\\]+)[/:]?(.*)$", spec, re.DOTALL)
    return (found.group(1), found.group(2)) if found else ("", spec)


def _advice(spec: str) -> str:
    from timm.models import is_model

    near = next(iter(get_close_matches(_split(spec)[0], KINDS.names(), n=1)), None)
    if is_model(spec):
        return f" (did you mean timm/{spec}?)"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and near is None:
        return f" (on the Hugging Face hub it would be hf/{spec}, or hf-hub:{spec} in timm's format)"
    return f" (did you mean {near!r}?)" if near else ""


def _listing() -> str:
    patterns = {"timm": "timm/NAME[@FILE]", "hf": "hf/ORG/NAME", "hf-hub": "hf-hub:ORG/NAME"}
    patterns["open_clip"] = "open_clip/ARCH/TAG"
    names = [patterns.get(name, name) for name in KINDS.names()]
    return f"Known: {', '.join(names)}, a folder"


def checked_device(device: str | torch.device) -> torch.device:
    """The device by its name; "auto" is cuda, else mps, else cpu.

    Raises:
        ValueError: for a name torch does not know, or a device this machine lacks.
    """
    has_mps = torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r} is unknown; auto, cpu, cuda, cuda:1 or mps") from error
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= cards:
        raise ValueError(f"device {str(found)!r}: this machine has {cards} CUDA devices; use device='auto' or 'cpu'")
    if found.type == "mps" and not has_mps:
        raise ValueError("device 'mps': this machine has none; use device='auto' or 'cpu'")
    return found


def checked_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point type by its name.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if SHORT.get(name, name) not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown; one of {', '.join(DTYPES)}")
        return DTYPES[SHORT.get(name, name)]
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, got {dtype}")
    return dtype
