"""Models from local folders: those Regista saved, timm's and transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regista.backbones.base import Backbone
from regista.backbones.checkpoint_files import read_state_dict, weight_file
from regista.backbones.model_record import FILE, apply_record, read_record
from regista.backbones.own_format import FOREIGN_CONFIG, read_own_folder
from regista.backbones.sources import check_timm_name, load_transformers
from regista.backbones.timm_files import backbone_from_file

Size = tuple[int, int]
CONFIG = "config.json"


def from_folder(folder: Path, *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """A model from a folder with ``config.json`` and weights; ``regista.json`` is heeded where it is.

    Raises:
        ValueError: for a folder of another kind, and weights that cannot be read or do not fit.
    """
    record = read_record(folder / FILE) if (folder / FILE).is_file() else None
    config = _config(folder)
    if record is not None and "build" in record:
        backbone = read_own_folder(folder, record, allow_partial=allow_partial)
        backbone.name = str(folder)
    elif config.get("architecture") == FOREIGN_CONFIG["architecture"]:
        raise ValueError(f"{folder} lacks its {FILE}, without which this model cannot be built; copy the whole folder")
    elif "architecture" in config:
        backbone = _from_timm_folder(folder, config, image_size, allow_partial)
    elif "model_type" in config:
        backbone = load_transformers(folder, name=str(folder), image_size=image_size, allow_partial=allow_partial)
    else:
        raise ValueError(
            f'{folder / CONFIG} has neither an "architecture" (timm) nor a "model_type" (transformers); for bare '
            "weights say the architecture: timm/NAME@FOLDER"
        )
    if record is not None:
        apply_record(backbone, record)
        backbone.image_size = image_size or backbone.image_size
        backbone.to(dtype=getattr(torch, str(record["dtype"]), None))
    return backbone


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "nothing"
        raise ValueError(
            f"{folder} holds no model: wanted a {CONFIG} of timm or transformers beside the weights, found {found}; "
            "for bare weights say the architecture: timm/NAME@FILE"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a model's configuration: wanted an object, got a {type(config).__name__}")
    return config


def _from_timm_folder(folder: Path, config: dict[str, Any], image_size: Size | None, allow_partial: bool) -> Backbone:
    import timm

    check_timm_name(str(config["architecture"]), pretrained=False)

    def create(**arguments: Any) -> nn.Module:
        try:
            model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False, **arguments)
        except (RuntimeError, TypeError, AssertionError, LookupError, AttributeError) as error:
            raise ValueError(f"{folder / CONFIG}: timm cannot build this model: {error}") from error
        return model

    return backbone_from_file(
        create,
        read_state_dict(folder),
        name=str(folder),
        source=str(weight_file(folder)),
        image_size=image_size,
        allow_partial=allow_partial,
    )
