"""Bringing images to one size that the patch size divides, and saying what was done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from regista.data.placement import FittedImages, Placement, Size, as_text, describe
from regista.data.reading import load_image, to_rgb

FitPolicy = Literal["resize", "pad", "crop", "error"]
Source = Tensor | Image.Image
TOLERANCE = 1e-3


def checked_size(image_size: Any) -> tuple[int, int] | None:
    """(height, width) from one number or two.

    Raises:
        ValueError: for anything else, or sizes that are not positive.
    """
    if image_size is None:
        return None
    if not isinstance(image_size, (int, list, tuple)):
        raise ValueError(f"image_size is (height, width) in pixels, or one number for both, got {image_size!r}")
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise ValueError(f"image_size is (height, width) in pixels, or one number for both, got {image_size!r}")
    return int(pair[0]), int(pair[1])


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
    """Bring images to one size that the patch divides, and normalise them.

    Files and PIL images are resampled by Pillow, tensors and arrays by torch, both bicubic with
    antialias. An image that has the size already is not touched but for the normalisation.

    Args:
        images: A path, PIL image, array (h, w, 3) or (h, w), or a list of these; or raw RGB
            tensors (B, 3, h, w) or (3, h, w). Arrays and tensors are uint8 or float in [0, 1].
        size: (height, width) wanted. By default ``default_size`` for paths and PIL images,
            and their own for tensors and arrays.
        policy: ``resize``: the nearest size that the patch divides, aspect not kept. ``pad``:
            rounded up; the image is scaled to fit inside, placed top left, the rest is the
            mean colour. ``crop``: rounded down; the image is scaled to cover, its centre kept.
            Tensors and arrays at their own size are padded or cropped without scaling.
            ``error``: nothing is changed.

    Raises:
        ValueError: for another policy, unlike sizes without ``size``, values outside [0, 1],
            an unreadable file, a size below one patch to crop to, or an image that ``error``
            would have to change.
    """
    if policy not in get_args(FitPolicy):
        raise ValueError(f"policy is one of {get_args(FitPolicy)}, got {policy!r}")
    sources = _sources(images)
    scaled = size is not None or any(isinstance(source, Image.Image) for source in sources)
    wanted = size or (default_size if scaled else _common_size(sources))
    target = rounded_size(wanted, patch_size, policy)
    remark = "" if target == tuple(wanted) else f", as the patch of {patch_size} does not divide {as_text(wanted)}"
    fitted, placements, valid = [], [], []
    for source in sources:
        pixels, place = _place(source, target, policy, scaled=scaled, remark=remark)
        valid.append(_valid_cells((pixels.shape[-2], pixels.shape[-1]), target, patch_size).to(pixels.device))
        fitted.append(_normalised(pixels, target, mean, std))
        placements.append(place)
    return FittedImages(torch.stack(fitted), torch.stack(valid), describe(placements), tuple(placements))


def rounded_size(size: Size, patch_size: int, policy: FitPolicy) -> Size:
    """The size that the patch divides: nearest and at least one patch (resize), up (pad), down (crop).

    Raises:
        ValueError: for a size that is not positive, or that ``error`` or ``crop`` cannot take.
    """
    height, width = size
    if min(size) < 1:
        raise ValueError(f"an image size is (height, width) in pixels, both positive, got {size}")
    if policy == "error" and (height % patch_size or width % patch_size):
        raise ValueError(
            f"image size {as_text(size)} is not divisible by the patch size {patch_size}; "
            "use policy='resize' | 'pad' | 'crop'"
        )
    if policy == "crop" and min(size) < patch_size:
        raise ValueError(
            f"image size {as_text(size)} is smaller than one patch of {patch_size}; use policy='resize' or 'pad'"
        )
    if policy == "resize":
        cells = [max(1, int(side / patch_size + 0.5)) for side in size]
    else:
        cells = [-(-side // patch_size) if policy == "pad" else side // patch_size for side in size]
    return cells[0] * patch_size, cells[1] * patch_size


def _sources(images: Any) -> list[Source]:
    """Images as RGB PIL images or as (3, h, w) float tensors in [0, 1]."""
    if isinstance(images, (Tensor, np.ndarray)) and images.ndim == 4:
        images = list(images)
    if isinstance(images, (Tensor, np.ndarray, Image.Image, str, Path)):
        images = [images]
    found: list[Source] = []
    for index, image in enumerate(images):
        if isinstance(image, (str, Path)):
            found.append(load_image(image))
        elif isinstance(image, Image.Image):
            found.append(image if image.mode == "RGB" and not image.has_transparency_data else to_rgb(image))
        else:
            found.append(_checked(image if isinstance(image, Tensor) else _channels_first(image, index), index))
    if not found:
        raise ValueError("got no images")
    return found


def _channels_first(image: Any, index: int) -> Tensor:
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.stack([array] * 3, -1)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ValueError(f"image {index}: an array is (height, width, 3) or (height, width), got {array.shape}")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"image {index}: pixels are uint8 or float in [0, 1], got {array.dtype}")
    return torch.tensor(array.transpose(2, 0, 1))


def _checked(image: Tensor, index: int) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"image {index}: a tensor is (3, height, width), got {tuple(image.shape)}")
    if image.dtype == torch.uint8:
        return image.float() / 255
    if not image.is_floating_point():
        raise ValueError(f"image {index}: pixels are uint8 or float in [0, 1], got {image.dtype}")
    image = image.float()
    low, high = (float(value) for value in image.detach().aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"image {index} has NaN or infinite pixels")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(
            f"image {index}: raw float pixels are in [0, 1], got {low:.3g} to {high:.3g}; already normalised?"
        )
    return image


def _size(source: Source) -> Size:
    return (source.height, source.width) if isinstance(source, Image.Image) else (source.shape[-2], source.shape[-1])


def _common_size(sources: Sequence[Source]) -> Size:
    sizes = sorted({_size(source) for source in sources})
    if len(sizes) > 1:
        raise ValueError(f"images of unlike sizes {sizes}; say image_size=(height, width)")
    return sizes.pop()


def _place(source: Source, target: Size, policy: FitPolicy, *, scaled: bool, remark: str) -> tuple[Tensor, Placement]:
    """The part of an image that fills the target's top left, in [0, 1], and where it lies."""
    original = _size(source)
    if policy == "error" and original != target:
        raise ValueError(
            f"an image of {as_text(original)} would have to change to {as_text(target)} (height x width); "
            "use policy='resize' | 'pad' | 'crop'"
        )
    before = (0, 0)
    if policy == "crop" and scaled:
        source, before = _middle(source, target)
    size = _size(source)
    whole = target if policy == "resize" else _whole_size(size, target, policy) if scaled else size
    shown = (min(whole[0], target[0]), min(whole[1], target[1]))
    start = ((whole[0] - shown[0]) // 2, (whole[1] - shown[1]) // 2)
    scale = (whole[0] / size[0], whole[1] / size[1])
    offset = (-start[0] - before[0] * scale[0], -start[1] - before[1] * scale[1])
    part = _scaled_part(source, whole, start, shown)
    pixels = _to_tensor(part) if isinstance(part, Image.Image) else part
    action = _action(original, target, policy, scaled=whole != size, remark=remark)
    return pixels, Placement(original, scale, offset, action)


def _whole_size(size: Size, target: Size, policy: FitPolicy) -> Size:
    """The whole image's size at kept aspect: inside the target (pad) or covering it (crop)."""
    ratios = (target[0] / size[0], target[1] / size[1])
    if policy == "pad":
        ratio = min(ratios)
        return min(target[0], max(1, round(size[0] * ratio))), min(target[1], max(1, round(size[1] * ratio)))
    ratio = max(ratios)
    return max(target[0], round(size[0] * ratio)), max(target[1], round(size[1] * ratio))


def _middle(source: Source, target: Size) -> tuple[Source, Size]:
    """The middle of an image so long that a centre crop shows little of it, and where that starts.

    The rest would be scaled up in vain. The middle has a wide margin, and the same centre.
    """
    size = _size(source)
    ratio = max(target[0] / size[0], target[1] / size[1])
    starts = [0, 0]
    for axis in (0, 1):
        kept = 4 * math.ceil(target[axis] / ratio) + 16
        starts[axis] = (size[axis] - kept) // 2 if size[axis] > 2 * kept else 0
    inner = (size[0] - 2 * starts[0], size[1] - 2 * starts[1])
    start = (starts[0], starts[1])
    return (source, start) if inner == size else (_cut(source, start, inner), start)


def _cut(source: Source, start: Size, shown: Size) -> Source:
    if isinstance(source, Image.Image):
        return source.crop((start[1], start[0], start[1] + shown[1], start[0] + shown[0]))
    return source.narrow(-2, start[0], shown[0]).narrow(-1, start[1], shown[1])


def _scaled_part(source: Source, whole: Size, start: Size, shown: Size) -> Source:
    """An image scaled to ``whole`` (bicubic, antialias), cut to ``shown`` from ``start`` on."""
    size = _size(source)
    if whole == size:
        return _cut(source, start, shown)
    if isinstance(source, Image.Image):  # only the part is computed
        top, left = start[0] * size[0] / whole[0], start[1] * size[1] / whole[1]
        bottom, right = (start[0] + shown[0]) * size[0] / whole[0], (start[1] + shown[1]) * size[1] / whole[1]
        box = (left, top, min(right, size[1]), min(bottom, size[0]))
        return source.resize((shown[1], shown[0]), Image.Resampling.BICUBIC, box=box)
    one_column = whole[1] == 1  # torch 2.14.1 repeats the first value down a single column; a single row is right
    image, target = (source.transpose(-1, -2), (1, whole[0])) if one_column else (source, whole)
    resized = F.interpolate(image.unsqueeze(0), size=target, mode="bicubic", antialias=True).squeeze(0).clamp(0, 1)
    return _cut(resized.transpose(-1, -2) if one_column else resized, start, shown)


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(np.asarray(image).transpose(2, 0, 1)).float() / 255


def _normalised(pixels: Tensor, target: Size, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(3, h, w) in [0, 1] -> (3, H, W) normalised, 0 (the mean colour) beyond the image."""
    shift, scale = pixels.new_tensor(mean).view(3, 1, 1), pixels.new_tensor(std).view(3, 1, 1)
    height, width = pixels.shape[-2:]
    return F.pad((pixels - shift) / scale, (0, target[1] - width, 0, target[0] - height))


def _valid_cells(shown: Size, target: Size, patch_size: int) -> Tensor:
    """(rows, cols) bool: cells of which the image fills half, or the fullest ones where there is none."""
    rows, cols = (torch.arange(0, end, patch_size) for end in target)
    area = torch.outer((shown[0] - rows).clamp(0, patch_size), (shown[1] - cols).clamp(0, patch_size))
    return area * 2 >= min(patch_size**2, 2 * int(area.max()))


def _action(original: Size, target: Size, policy: FitPolicy, *, scaled: bool, remark: str) -> str:
    """What was done to one image, in words."""
    if original == target:
        return f"kept at {as_text(target)}{remark}" if remark else ""
    if policy == "resize":
        wider = (target[0] * original[1]) / (target[1] * original[0])
        return f"resized to {as_text(target)}{remark}" + (", aspect not kept" if abs(math.log(wider)) > 0.01 else "")
    done = "padded" if policy == "pad" else "cropped at the centre"
    return f"{'scaled and ' if scaled else ''}{done} to {as_text(target)}{remark}"
