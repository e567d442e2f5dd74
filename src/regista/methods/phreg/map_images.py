"""Images as stored targets see them: whole, the short side at the training size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from regista.data.fit import fit_images
from regista.data.images import FittedImages, UnreadableImage, load_image

_ORIENTATION = 0x0112
_UPRIGHT = (None, 1, 2, 3, 4)


@dataclass(frozen=True)
class MapGeometry:
    """How an image becomes the rectangle that its target map covers.

    Attributes:
        image_size: R, the short side in pixels; crops of R x R are taken from the map.
        patch_size: Divides R.
        max_aspect: Longest long side, in short sides; what is longer loses its ends.
        mean, std: Of the backbone.

    Raises:
        ValueError: for a size that the patch does not divide, or an aspect below 1.
    """

    image_size: int
    patch_size: int
    max_aspect: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.image_size < 1 or self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not divisible by the patch size {self.patch_size}; "
                f"take {max(1, round(self.image_size / self.patch_size)) * self.patch_size}"
            )
        if not 1 <= self.max_aspect <= 100:
            raise ValueError(f"max_aspect is between 1 (square maps) and 100, got {self.max_aspect}")

    def map_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of an image -> (height, width) of its map in pixels.

        The short side is R. The long side keeps the aspect, rounded down to whole patches: less
        than a patch is cut off, half at each end, and nothing is squeezed.
        """
        short, long = min(size), max(size)
        longest = min(long * self.image_size // short, int(self.max_aspect * self.image_size))
        side = max(self.image_size, longest // self.patch_size * self.patch_size)
        return (self.image_size, side) if size[0] <= size[1] else (side, self.image_size)

    def grid_size(self, map_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, cols) of a map of (height, width) in pixels."""
        return map_size[0] // self.patch_size, map_size[1] // self.patch_size

    def fit(self, images: Sequence[Image.Image]) -> FittedImages:
        """Images of one map size, scaled (bicubic), cut at the ends and normalised."""
        (size,) = {self.map_size((image.height, image.width)) for image in images}
        return fit_images(
            list(images),
            size=size,
            default_size=size,
            patch_size=self.patch_size,
            mean=self.mean,
            std=self.std,
            policy="crop",
        )


@dataclass(frozen=True)
class ImageEntry:
    """One image of a list: which file, and what became of it.

    Attributes:
        path: As it was given.
        bytes: Size of the file, 0 if there is none.
        sha256: Of the file's content, empty if there is none.
        map_size: (height, width) of its map in pixels, None if it cannot be read.
        reason: Why it has no target, empty otherwise.
    """

    path: str
    bytes: int
    sha256: str
    map_size: tuple[int, int] | None
    reason: str = ""


def describe_images(paths: Sequence[Path], geometry: MapGeometry) -> list[ImageEntry]:
    """Hash every file and read its size; a file that cannot be read gets a reason and no map."""
    return [_describe(Path(path), geometry) for path in paths]


def _describe(path: Path, geometry: MapGeometry) -> ImageEntry:
    try:
        digest, size = hash_file(path)
    except OSError:
        digest, size = "", 0
    try:
        height, width = _upright_size(path)
    except UnreadableImage as error:
        return ImageEntry(str(path), size, digest, None, error.reason)
    return ImageEntry(str(path), size, digest, geometry.map_size((height, width)))


def hash_file(path: Path) -> tuple[str, int]:
    """SHA-256 and size in bytes of a file's content."""
    content, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            content.update(block)
            size += len(block)
    return content.hexdigest(), size


def _upright_size(path: Path) -> tuple[int, int]:
    """(height, width) after the EXIF orientation, from the header where that is enough."""
    try:
        with Image.open(path) as header:
            if header.getexif().get(_ORIENTATION) in _UPRIGHT:
                return header.height, header.width
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        pass  # decoding says why, or finds that only the EXIF block is broken
    image = load_image(path)
    return image.height, image.width
