"""Reading image files of every kind as RGB, and naming those that cannot be read."""

from __future__ import annotations

import contextlib
import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif", ".jp2"}
)


class UnreadableImage(ValueError):  # noqa: N818  the name says enough
    """A file that is no image, or not a whole one.

    Attributes:
        path: The file.
        reason: Why, in words, without the file's name.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class LoadedImages:
    """Images that could be read, where they come from, and what could not.

    Attributes:
        images: RGB images.
        paths: Their files, in the same order.
        skipped: (path, reason) of the others.
    """

    images: list[Image.Image]
    paths: list[Path]
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def load_image(path: str | Path) -> Image.Image:
    """Read one image file as RGB, upright.

    Transparency is laid over white, the first frame of an animation is taken, the EXIF
    orientation is applied; for grey of more than 8 bits see ``to_rgb``.

    Raises:
        UnreadableImage: if the file is missing, a folder, empty, truncated, no image, or so
            large that Pillow takes it for a decompression bomb; names the file and the reason.
    """
    path = Path(path)
    reason = _obstacle(path)
    if not reason:
        try:
            with Image.open(path) as image:
                image.load()
                with contextlib.suppress(Exception):  # a broken EXIF block does not spoil the pixels
                    ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image)
        except Exception as error:  # every decoder raises its own kinds
            reason = _reason(error)
    raise UnreadableImage(path, reason)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL mode as a new RGB image, by value, transparency over white.

    White of 16-bit and 32-bit integers (modes I;16, I) is 65535, or their highest value where
    that is above. White of floats (mode F) is the first of 1, 255, 65535 that their highest
    value does not exceed by more than half, so that small overshoots are clipped.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep_grey(np.asarray(image), whites=(1, 255, 65535) if image.mode == "F" else (65535,))
    if image.has_transparency_data:
        layered = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def find_images(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files, folders and glob patterns as one list of files, in the order given.

    A folder gives the images below it by their suffix, sorted, hidden ones left out; a pattern
    (``**`` for any depth) gives its matches, sorted, folders among them as above. A file named
    in full is taken whatever its suffix. What is named twice comes twice.

    Raises:
        ValueError: for a path that is not there, or a folder or pattern without an image.
    """
    found: list[Path] = []
    for given in [paths] if isinstance(paths, (str, Path)) else paths:
        path = Path(given)
        if path.is_dir():
            inside = _images_below(path)
        elif path.exists():
            inside = [path]
        elif glob.has_magic(str(given)):
            matches = [Path(match) for match in sorted(glob.glob(str(given), recursive=True))]
            inside = [file for match in matches for file in (_images_below(match) if match.is_dir() else [match])]
        else:
            raise ValueError(f"{given}: no such file or folder")
        if not inside:
            raise ValueError(f"{given}: no image found there; wanted files such as .jpg, .png or .tif")
        found += inside
    return found


def unique_files(paths: Sequence[Path]) -> list[Path]:
    """The files in their order, each once, by whatever name it comes again."""
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(path.resolve(), path)
    return list(found.values())


def files_digest(paths: Sequence[Path]) -> str:
    """A hash of the names and sizes of files, in their order; cheap, and no proof that their content is the same."""
    lines = [f"{path.name} {path.stat().st_size}" for path in paths]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_images(paths: str | Path | Sequence[str | Path]) -> LoadedImages:
    """Read all that can be read of what ``find_images`` finds; the rest is named in ``skipped``.

    Raises:
        ValueError: as ``find_images``, or if not one image is left, with the reasons.
    """
    loaded = LoadedImages([], [])
    for path in find_images(paths):
        try:
            loaded.images.append(load_image(path))
            loaded.paths.append(path)
        except UnreadableImage as error:
            loaded.skipped.append((path, error.reason))
    if not loaded.images:
        raise ValueError(none_left(loaded.skipped))
    return loaded


def none_left(skipped: Sequence[tuple[Path, str]]) -> str:
    """The message when every image was skipped."""
    if not skipped:
        return "got no images"
    reasons = "; ".join(f"{path}: {reason}" for path, reason in skipped[:3])
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"none of {len(skipped)} image(s) could be read: {reasons}{more}"


def _images_below(folder: Path) -> list[Path]:
    found = []
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.suffix.lower() in SUFFIXES and file.is_file():
            found.append(file)
    return found


def _obstacle(path: Path) -> str:
    """Why a path cannot even be opened; empty if it can."""
    try:
        if path.is_dir():
            return "a folder, not an image"
        if not path.exists():
            return "no such file"
        if not path.is_file():
            return "not a regular file"
        return "" if path.stat().st_size else "the file is empty"
    except (OSError, ValueError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or broken at its beginning"
    if isinstance(error, MemoryError):
        return "does not fit into memory"
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return f"cannot be read ({' '.join(said.split())})"


def _from_deep_grey(values: np.ndarray, whites: Sequence[float]) -> Image.Image:
    if not np.isfinite(values).any():
        raise ValueError("not one pixel is a finite number")
    values = np.nan_to_num(values.astype(np.float32), nan=0, posinf=0, neginf=0)
    highest = float(values.max())
    slack = 1.5 if len(whites) > 1 else 1.0
    white = next((white for white in whites if highest <= slack * white), highest)
    grey = np.rint((values / white).clip(0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
