"""Reading image files of every kind as RGB, and naming those that cannot be read."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif", ".jp2"}
)


class UnreadableImage(ValueError):
    """A file that is no image, or not a whole one; the message names it and the reason."""


@dataclass(frozen=True)
class LoadedImages:
    """Images that could be read, where they come from, and what could not."""

    images: list[Image.Image]
    paths: list[Path]
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def load_image(path: str | Path) -> Image.Image:
    """Read one image file as RGB.

    Grey, 1-bit, palette, CMYK, 16-bit and float images are converted by value, transparency
    is laid over white, the first frame of an animation is taken, and EXIF orientation is
    applied.

    Raises:
        UnreadableImage: if the file is missing, empty, truncated or no image.
    """
    path = Path(path)
    if not path.exists():
        raise UnreadableImage(f"{path}: no such file")
    if path.is_dir():
        raise UnreadableImage(f"{path}: a folder, not an image")
    if path.stat().st_size == 0:
        raise UnreadableImage(f"{path}: the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.seek(0)
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # every decoder raises its own kinds
        reason = str(error) or type(error).__name__
        raise UnreadableImage(f"{path}: not a readable image ({' '.join(reason.split())})") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL mode to RGB, by value; transparency over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _from_deep_grey(np.asarray(image), sixteen_bit=image.mode.startswith("I;16"))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """Files, folders (all images below, sorted) and glob patterns as one list of files.

    Raises:
        ValueError: for a path that is not there, or a folder or pattern without an image.
    """
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        elif path.exists():
            inside = [path]
        elif glob.has_magic(str(given)):
            inside = sorted(file for file in map(Path, glob.glob(str(given), recursive=True)) if file.is_file())
        else:
            raise ValueError(f"{given}: no such file or folder")
        if not inside:
            raise ValueError(f"{given}: no image found there")
        found += inside
    return found


def load_images(paths: Sequence[str | Path]) -> LoadedImages:
    """Read all that can be read.

    Raises:
        ValueError: if not one image is left, naming the reasons.
    """
    loaded = LoadedImages([], [])
    for path in find_images(paths):
        try:
            loaded.images.append(load_image(path))
            loaded.paths.append(path)
        except UnreadableImage as error:
            loaded.skipped.append((path, str(error)))
    if not loaded.images:
        raise ValueError(none_left(loaded.skipped))
    return loaded


def none_left(skipped: Sequence[tuple[Path, str]]) -> str:
    """The message when every image was skipped."""
    reasons = "; ".join(reason for _, reason in skipped[:3])
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"none of the {len(skipped)} images could be read: {reasons}{more}"


def _from_deep_grey(values: np.ndarray, *, sixteen_bit: bool) -> Image.Image:
    """16-bit, 32-bit and float grey to 8 bits: white is 65535, or 255 or 1 where nothing is above."""
    values = np.nan_to_num(values.astype(np.float64))
    highest = float(values.max())
    white = 65535.0 if sixteen_bit or highest > 255 else 255.0 if highest > 1 else 1.0
    grey = np.rint((values / white).clip(0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
