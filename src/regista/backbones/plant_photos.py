"""Crops of photos in installed packages, to fit planted outliers on."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageEnhance, ImageFilter

# Photos, textures and pages of text: everything patches of low information may lie in.
_FILES = {
    "skimage": (
        "data",
        (
            "astronaut.png brick.png camera.png chelsea.png coffee.png coins.png grass.png gravel.png "
            "hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png page.png retina.jpg rocket.jpg text.png"
        ),
    ),
    "sklearn": ("datasets/images", "china.jpg flower.jpg"),
}
_DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}


def fit_photos() -> list[Path]:
    """The photos, without importing the packages they lie in.

    Raises:
        ValueError: if one is missing.
    """
    paths = []
    for package, (folder, names) in _FILES.items():
        spec = find_spec(package)
        root = Path(((spec and spec.submodule_search_locations) or ["."])[0]) / folder
        paths += [root / name for name in names.split()]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ValueError(
                f"planting needs photos from {_DISTRIBUTIONS[package]}, not found: {missing}; "
                "pip install 'regista[demo]'"
            )
    return paths


def photo_crops(count: int, image_size: tuple[int, int], seed: int) -> list[Image.Image]:
    """Random crops, mirrored, of changed brightness, contrast and colour, some blurred.

    Every photo gets its turn; the same bits for the same arguments.

    Args:
        image_size: (height, width) of the crops.
    """
    draw = random.Random(seed)  # noqa: S311  not for secrets
    photos = [Image.open(path).convert("RGB") for path in fit_photos()]
    return [_crop(photos[number % len(photos)], image_size, draw) for number in range(count)]


def _crop(photo: Image.Image, image_size: tuple[int, int], draw: random.Random) -> Image.Image:
    height, width = image_size
    area = draw.uniform(0.1, 1.0) * photo.width * photo.height
    aspect = draw.uniform(0.75, 1.33) * width / height
    wide, high = min(photo.width, (area * aspect) ** 0.5), min(photo.height, (area / aspect) ** 0.5)
    left, top = draw.uniform(0, photo.width - wide), draw.uniform(0, photo.height - high)
    box = (int(left), int(top), int(left + wide), int(top + high))
    crop = photo.crop(box).resize((width, height), Image.Resampling.BICUBIC)
    if draw.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if draw.random() < 0.3:
        crop = crop.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if draw.random() < 0.6:
        for change, low, high_factor in (
            (ImageEnhance.Brightness, 0.6, 1.4),
            (ImageEnhance.Contrast, 0.6, 1.4),
            (ImageEnhance.Color, 0.0, 1.8),
        ):
            crop = change(crop).enhance(draw.uniform(low, high_factor))
    if draw.random() < 0.25:
        crop = crop.filter(ImageFilter.GaussianBlur(draw.uniform(0.5, 2.0) * height / 224))
    return crop
