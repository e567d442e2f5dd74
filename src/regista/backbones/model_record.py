"""``regista.json``: what a saved model's own library has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regista.backbones.base import Backbone
from regista.backbones.positions import PositionResize

FILE = "regista.json"
FORMAT_VERSION = 1
_WANTED = ("library", "image_size", "num_register_tokens", "mean", "std", "dtype")


def record_of(backbone: Backbone) -> dict[str, Any]:
    """The convention of the position table, sizes, normalisation, history and the truth about planted outliers.

    Raises:
        ValueError: for planted outliers whose truth cannot be written down.
    """
    positions: PositionResize | None = getattr(backbone, "positions", None)
    planted = None
    if backbone.planted is not None:
        planted = getattr(backbone.planted, "metadata", None)
        if not planted:
            raise ValueError(f"{backbone.name}: its planted outliers come without metadata, so they cannot be saved")
    return {
        "format_version": FORMAT_VERSION,
        "library": backbone.library,
        "name": backbone.name,
        "image_size": list(backbone.image_size),
        "num_register_tokens": backbone.num_register_tokens,
        "positions": positions.to_dict() if isinstance(positions, PositionResize) else None,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "planted": None if planted is None else dict(planted),
        "history": list(backbone.history),
    }


def read_record(path: Path) -> dict[str, Any]:
    """A record from a file.

    Raises:
        ValueError: if it is not JSON, of a newer version, or lacks something.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f'{path} is not a record of a saved model: wanted a "format_version", got {version!r}')
    if version > FORMAT_VERSION:
        raise ValueError(f"{path} is of format version {version}, this Regista reads {FORMAT_VERSION}; update Regista")
    missing = [key for key in _WANTED if key not in record]
    if missing:
        raise ValueError(f"{path} lacks {missing}; save the model again")
    return dict(record)


def apply_record(backbone: Backbone, record: dict[str, Any]) -> None:
    """Give a loaded backbone what was recorded when it was saved, in place.

    Raises:
        ValueError: if the weights have another number of registers than the record says, or a value
            makes no sense.
    """
    if backbone.num_register_tokens != record["num_register_tokens"]:
        raise ValueError(
            f"{backbone.name}: {FILE} says {record['num_register_tokens']} registers, the weights have "
            f"{backbone.num_register_tokens}; the files are not from the same model"
        )
    try:
        height, width = (int(side) for side in record["image_size"])
        mean, std = ([float(value) for value in record[key]] for key in ("mean", "std"))
        positions = PositionResize(**record["positions"]) if record.get("positions") else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{backbone.name}: {FILE} cannot be used: {error}") from error
    backbone.history = list(record.get("history") or [])
    backbone.image_size, backbone.mean, backbone.std = (height, width), tuple(mean), tuple(std)
    if positions is not None:
        backbone.positions = positions  # type: ignore[attr-defined]
    if record.get("planted"):
        from regista.backbones.plant import planted_from_metadata

        backbone.planted = planted_from_metadata(record["planted"], backbone)


def keep_planted(source: Backbone, target: Backbone) -> None:
    """Give a converted model, whose blocks and MLP units are those of ``source``, its truth about planted outliers."""
    metadata = getattr(source.planted, "metadata", None)
    if metadata:
        from regista.backbones.plant import planted_from_metadata

        target.planted = planted_from_metadata(metadata, target)
