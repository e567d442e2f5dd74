"""Boxes and masks of objects, by image name: what a point-in-box measure needs."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Targets:
    """Objects of images in the pixels of the original file, found by the file's stem.

    Attributes:
        boxes: {stem: [(xmin, ymin, xmax, ymax), ...]}, max exclusive.
        masks: {stem: path of an image whose non-zero pixels are foreground}.
    """

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    masks: dict[str, Path] = field(default_factory=dict)

    def boxes_of(self, path: str | Path) -> list[Box]:
        """Boxes of one image, none if it has no annotation."""
        return self.boxes.get(Path(path).stem, [])

    def mask_of(self, path: str | Path) -> np.ndarray | None:
        """Foreground of one image, bool (height, width), or None."""
        found = self.masks.get(Path(path).stem)
        if found is None:
            return None
        with Image.open(found) as mask:
            values = np.asarray(mask)
        foreground: np.ndarray = values > 0
        return np.asarray(foreground.any(-1)) if values.ndim == 3 else foreground


def read_targets(*, boxes: Path | None = None, masks: Path | None = None) -> Targets:
    """Read boxes and masks.

    Args:
        boxes: A folder of VOC XML files, or a csv with the columns image (or file, name),
            xmin, ymin, xmax, ymax.
        masks: A folder of PNG masks.

    Raises:
        ValueError: if nothing readable is there.
    """
    found = Targets(
        _voc_folder(boxes) if boxes is not None and boxes.is_dir() else _csv(boxes) if boxes is not None else {},
        {path.stem: path for path in sorted(masks.glob("*.png"))} if masks is not None else {},
    )
    if boxes is not None and not found.boxes:
        raise ValueError(f"{boxes}: no box found; wanted VOC XML files or a csv with image,xmin,ymin,xmax,ymax")
    if masks is not None and not found.masks:
        raise ValueError(f"{masks}: no PNG mask found")
    return found


def read_voc_boxes(path: Path) -> list[Box]:
    """Boxes of one VOC XML file; VOC's 1-based, inclusive corners become 0-based, exclusive ones."""
    try:
        root = ET.parse(path).getroot()  # noqa: S314
        boxes = []
        for box in root.iter("bndbox"):
            xmin, ymin, xmax, ymax = (float(box.findtext(key, "")) for key in ("xmin", "ymin", "xmax", "ymax"))
            boxes.append((xmin - 1, ymin - 1, xmax, ymax))
    except (ET.ParseError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a readable VOC annotation ({error})") from error
    return boxes


def _voc_folder(folder: Path) -> dict[str, list[Box]]:
    return {path.stem: read_voc_boxes(path) for path in sorted(folder.glob("*.xml"))}


def _csv(path: Path) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = defaultdict(list)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name = row.get("image") or row.get("file") or row.get("name")
                if not name:
                    raise ValueError("no column named image, file or name")
                xmin, ymin, xmax, ymax = (float(row[key]) for key in ("xmin", "ymin", "xmax", "ymax"))
                found[Path(name).stem].append((xmin, ymin, xmax, ymax))
    except (OSError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted a csv with the columns image,xmin,ymin,xmax,ymax ({error})") from error
    return dict(found)
