"""Bringing images to one size that the patch size divides, and saying what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from regista.data.reading import load_image, to_rgb

FitPolicy = Literal["resize", "pad", "crop", "error"]
Size = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Where an image came to lie: fitted = scale * original + offset, as (y, x) in pixels."""

    scale: tuple[float, float]
    offset: tuple[float, float]


@dataclass(frozen=True)
class FittedImages:
    """Images of one size, normalised, and which of their cells are real.

    Attributes:
        pixels: (B, 3, H, W) float32.
        valid: (B, rows, cols) bool, False where at least half of a cell is padding.
        note: What was done, in words; empty if nothing.
        placements: Of each image, for boxes and masks.
    """

    pixels: Tensor
    valid: Tensor
    note: str = ""
    placements: list[Placement] = field(default_factory=list)

    def boxes_to_fitted(self, index: int, boxes: Sequence[Sequence[float]]) -> np.ndarray:
        """Boxes (k, 4) of the original image in fitted pixels, clipped; (xmin, ymin, xmax, ymax), max exclusive.

        Boxes that lie outside the fitted image are dropped.
        """
        place = self.placements[index]
        height, width = self.pixels.shape[-2:]
        scale = np.array([*reversed(place.scale), *reversed(place.scale)])
        offset = np.array([*reversed(place.offset), *reversed(place.offset)])
        moved = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * scale + offset
        moved = moved.clip(0, [width, height, width, height])
        kept: np.ndarray = moved[(moved[:, 2] > moved[:, 0]) & (moved[:, 3] > moved[:, 1])]
        return kept

    def mask_to_fitted(self, index: int, mask: np.ndarray) -> np.ndarray:
        """A mask (h, w) of the original image in the fitted frame (H, W), by nearest neighbour; 0 outside."""
        place = self.placements[index]
        height, width = self.pixels.shape[-2:]
        rows = np.floor((np.arange(height) + 0.5 - place.offset[0]) / place.scale[0]).astype(int)
        cols = np.floor((np.arange(width) + 0.5 - place.offset[1]) / place.scale[1]).astype(int)
        inside = ((rows >= 0) & (rows < mask.shape[0]))[:, None] & ((cols >= 0) & (cols < mask.shape[1]))[None]
        picked = mask[rows.clip(0, mask.shape[0] - 1)][:, cols.clip(0, mask.shape[1] - 1)]
        fitted: np.ndarray = np.where(inside, picked, np.zeros_like(picked))
        return fitted


def fit_images(
    images: Any,
    *,
    size: Size | None,
    default_size: Size,
    patch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    policy: FitPolicy = "resize",
) -> FittedImages:
    """Bring images to one size and normalise them.

    Args:
        images: A path, PIL image, array (h, w, 3) or (h, w), or a list of these; or raw RGB
            tensors (B, 3, h, w) or (3, h, w), uint8 or float in [0, 1].
        size: (height, width) wanted. By default ``default_size`` for paths and PIL images,
            and their own for tensors and arrays.
        policy: ``resize``: the nearest size that the patch divides, aspect not kept. ``pad``:
            rounded up; the image is scaled to fit inside, placed top left, the rest is the
            mean colour. ``crop``: rounded down; the image is scaled to cover, its centre kept.
            ``error``: nothing is changed, ``ValueError`` where something would have to be.

    Raises:
        ValueError: for another policy, unlike sizes without ``size``, values outside [0, 1],
            an unreadable file, or an image that ``error`` would have to change.
    """
    if policy not in get_args(FitPolicy):
        raise ValueError(f"policy is one of {get_args(FitPolicy)}, got {policy!r}")
    tensors, files = _as_tensors(images)
    if size is None and files:
        size = default_size
    if size is None:
        sizes = {(tensor.shape[-2], tensor.shape[-1]) for tensor in tensors}
        if len(sizes) != 1:
            raise ValueError(f"images of unlike sizes {sorted(sizes)}; say image_size=(height, width)")
        own = sizes.pop()
        target = rounded_size(own, patch_size, policy)
        scaled = policy == "resize"
    else:
        target = rounded_size(size, patch_size, policy)
        scaled = True
    if min(target) < 1:
        raise ValueError(f"image size {target} is not positive")
    placed = [_place(tensor, target, policy, scaled, mean) for tensor in tensors]
    pixels = torch.stack([pixels for pixels, _ in placed])
    shift = torch.tensor(mean).view(3, 1, 1)
    scale = torch.tensor(std).view(3, 1, 1)
    placements = [place for _, place in placed]
    valid = torch.stack(
        [_valid_cells(tensor, place, target, patch_size) for tensor, place in zip(tensors, placements, strict=True)]
    )
    return FittedImages((pixels - shift) / scale, valid, _note(tensors, target, size, policy), placements)


def rounded_size(size: Size, patch_size: int, policy: FitPolicy) -> Size:
    """The size that the patch divides: nearest (resize), up (pad), down (crop)."""
    height, width = size
    if policy == "error" and (height % patch_size or width % patch_size):
        raise ValueError(f"image size {height}x{width} is not divisible by the patch size {patch_size} (policy 'error')")
    if policy == "crop" and min(size) < patch_size:
        raise ValueError(f"image size {height}x{width} is smaller than one patch of {patch_size}; nothing to crop")
    cells = {
        "resize": lambda side: max(1, int(side / patch_size + 0.5)),
        "pad": lambda side: -(-side // patch_size),
        "crop": lambda side: side // patch_size,
        "error": lambda side: side // patch_size,
    }[policy]
    return cells(height) * patch_size, cells(width) * patch_size


def _as_tensors(images: Any) -> tuple[list[Tensor], bool]:
    """Images as (3, h, w) float tensors in [0, 1], and whether any was a file or PIL image."""
    if isinstance(images, Tensor) and images.ndim == 4:
        return [_from_tensor(image) for image in images], False
    if isinstance(images, (Tensor, np.ndarray, Image.Image, str, Path)):
        images = [images]
    found, files = [], False
    for image in images:
        if isinstance(image, (str, Path)):
            image = load_image(image)
        if isinstance(image, Image.Image):
            files = True
            image = np.asarray(to_rgb(image))
        found.append(_from_tensor(image) if isinstance(image, Tensor) else _from_array(image))
    if not found:
        raise ValueError("got no images")
    return found, files


def _from_array(image: Any) -> Tensor:
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.stack([array] * 3, -1)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ValueError(f"an array image is (height, width, 3) or (height, width), got {array.shape}")
    return _from_tensor(torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))))


def _from_tensor(image: Tensor) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"a tensor image is (3, height, width), got {tuple(image.shape)}")
    if image.dtype == torch.uint8:
        return image.float() / 255
    if not image.is_floating_point():
        raise ValueError(f"a tensor image is uint8 or float in [0, 1], got {image.dtype}")
    image = image.float()
    if not torch.isfinite(image).all():
        raise ValueError("a raw image has NaN or infinite pixels")
    if image.min() < -1e-3 or image.max() > 1 + 1e-3:
        raise ValueError(
            f"raw float images are in [0, 1], got {image.min():.3g} to {image.max():.3g}; already normalised?"
        )
    return image


def _place(
    image: Tensor, target: Size, policy: FitPolicy, scaled: bool, mean: Sequence[float]
) -> tuple[Tensor, Placement]:
    height, width = image.shape[-2:]
    if (height, width) == target:
        return image, Placement((1.0, 1.0), (0.0, 0.0))
    if policy == "error":
        raise ValueError(f"an image of {height}x{width} would have to change to {target[0]}x{target[1]} (policy 'error')")
    ratios = (target[0] / height, target[1] / width)
    if policy == "resize":
        return _resized(image, target), Placement(ratios, (0.0, 0.0))
    if policy == "pad":
        ratio = min(ratios) if scaled else 1.0
        inner = (min(target[0], max(1, round(height * ratio))), min(target[1], max(1, round(width * ratio))))
        canvas = torch.tensor(mean).view(3, 1, 1).expand(3, *target).clone()
        canvas[:, : inner[0], : inner[1]] = _resized(image, inner)
        return canvas, Placement((inner[0] / height, inner[1] / width), (0.0, 0.0))
    ratio = max(ratios) if scaled else 1.0
    outer = (max(target[0], round(height * ratio)), max(target[1], round(width * ratio)))
    top, left = ((whole - part) // 2 for whole, part in zip(outer, target, strict=True))
    covering = _resized(image, outer)
    kept = covering.narrow(-2, top, target[0]).narrow(-1, left, target[1])
    return kept, Placement((outer[0] / height, outer[1] / width), (-float(top), -float(left)))


def _resized(image: Tensor, size: Size) -> Tensor:
    if tuple(image.shape[-2:]) == size:
        return image
    resized = F.interpolate(image.unsqueeze(0), size=size, mode="bicubic", antialias=True)
    return resized.squeeze(0).clamp(0, 1)


def _valid_cells(image: Tensor, place: Placement, target: Size, patch_size: int) -> Tensor:
    covered = []
    for axis in (0, 1):
        end = min(target[axis], image.shape[axis - 2] * place.scale[axis] + place.offset[axis])
        start = torch.arange(0, target[axis], patch_size)
        covered.append(((end - start).clamp(0, patch_size) / patch_size).double())
    return torch.outer(covered[0], covered[1]) > 0.5


def _note(tensors: Sequence[Tensor], target: Size, wanted: Size | None, policy: FitPolicy) -> str:
    sizes = {(tensor.shape[-2], tensor.shape[-1]) for tensor in tensors}
    said = ""
    if wanted is not None and wanted != target:
        said = f"size {wanted[0]}x{wanted[1]} is not divisible by the patch, took {target[0]}x{target[1]}; "
    if sizes != {target}:
        first = sorted(sizes)[0]
        many = "" if len(sizes) == 1 else " and others"
        done = {
            "resize": "resized, aspect not kept,",
            "pad": "scaled to fit inside and padded",
            "crop": "scaled to cover and centre-cropped",
            "error": "changed",
        }[policy]
        said += f"images of {first[0]}x{first[1]}{many} {done} to {target[0]}x{target[1]} (height x width)"
    return said.removesuffix("; ")
