"""What stored targets are of: the settings and images that ``index.json`` keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from regista.methods.phreg.map_images import ImageEntry, MapGeometry
from regista.results.writing import write_whole

INDEX = "index.json"
VERSION = 1
DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class TargetSettings:
    """Everything that a target depends on, but for the images.

    Attributes:
        model: Name, for messages only.
        weights: ``regista.backbones.weights.weights_hash`` of the teacher.
        readout: Name of the features that were averaged.
        embed_dim: D.
        geometry: Size and normalisation of the images.
        num_views, shift_ratio, seed: Of the views.
        dtype: "float16", or "float32" for features beyond 65504.
    """

    model: str
    weights: str
    readout: str
    embed_dim: int
    geometry: MapGeometry
    num_views: int
    shift_ratio: float
    seed: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"targets are stored as {' or '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True)
class TargetIndex:
    """The content of ``index.json``.

    Attributes:
        settings: See ``TargetSettings``.
        images: One entry for each image of the list, in its order.
        shard_size: Targets a file.
    """

    settings: TargetSettings
    images: tuple[ImageEntry, ...]
    shard_size: int

    def write(self, folder: Path) -> None:
        """Write ``index.json``, whole or not at all."""
        content = {"version": VERSION, "shard_size": self.shard_size, "settings": asdict(self.settings)}
        text = json.dumps(content | {"images": [asdict(entry) for entry in self.images]}, indent=1)

        def write(partial: Path) -> None:
            partial.write_text(text, encoding="utf-8")

        write_whole(folder / INDEX, write)

    @classmethod
    def read(cls, folder: Path) -> TargetIndex:
        """Read it back.

        Raises:
            ValueError: if it is not there, is damaged or of another version.
        """
        path = folder / INDEX
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            version = content["version"]
            if version != VERSION:
                raise ValueError(
                    f"{path} has version {version}, this release reads {VERSION}; compute the targets anew"
                )
            settings = _tuples(content["settings"])
            settings["geometry"] = MapGeometry(**_tuples(settings["geometry"]))
            images = tuple(ImageEntry(**_tuples(entry)) for entry in content["images"])
            return cls(TargetSettings(**settings), images, int(content["shard_size"]))
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no targets ({INDEX} is not there)") from None
        except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no index of targets, or damaged: {error}") from error

    def check(self, settings: TargetSettings, images: Sequence[ImageEntry], folder: Path) -> None:
        """Raise ``ValueError`` with both values if it is of other settings or images than these."""
        own, given = _flat(self.settings), _flat(settings)
        for key, value in own.items():
            if key != "model" and value != given[key]:
                models = f" (of {own['model']} and {given['model']})" if key == "weights" else ""
                raise ValueError(
                    f"the targets in {folder} were made with {key} {value}, now it is {given[key]}{models}; "
                    "take another folder"
                )
        if len(self.images) != len(images):
            raise ValueError(
                f"the targets in {folder} are of {len(self.images)} images, now there are {len(images)}; "
                "take another folder"
            )
        for index, (mine, other) in enumerate(zip(self.images, images, strict=True)):
            if mine.sha256 != other.sha256:
                raise ValueError(
                    f"image {index} in {folder} is {_named(mine)}, now it is {_named(other)}; take another folder"
                )


def _flat(settings: TargetSettings) -> dict[str, Any]:
    content = asdict(settings)
    geometry: dict[str, Any] = content.pop("geometry")
    return {**content, **geometry}


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}


def _named(entry: ImageEntry) -> str:
    return f"{entry.path} ({entry.bytes} bytes, sha256 {entry.sha256[:12] or 'none'})"
