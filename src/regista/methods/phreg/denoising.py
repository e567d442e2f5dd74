"""Denoised patch features of a frozen ViT: the mean over shifted and flipped views.

Source: PH-Reg (arXiv 2505.21501), test-time augmentation of the teacher. An artifact that stays at
a grid cell, or depends on where a patch lies, falls on another part of the image in every view,
so the mean over the views that saw a part keeps what belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.layers.shifted_views import accumulate, coverage, sample_views, view_of

ReadOut = Callable[[Backbone, Tensor], Tensor]
Views = tuple[Any, Any]


@dataclass(frozen=True)
class Denoised:
    """Denoised features and what the mean did to them.

    Attributes:
        patches: (B, P, D) mean over views, row by row, at least float32.
        coverage: How many views saw each cell, (rows, cols) int64, or (B, rows, cols) where every
            image had views of its own.
        shrinkage: (B,) mean length of the denoised features over the mean length of the raw ones
            of the identity view. The mean is not scaled back, so this is usually 0.93 to 0.99.
            None if no view is the identity.
    """

    patches: Tensor
    coverage: Tensor
    shrinkage: Tensor | None


def denoise(
    backbone: Backbone,
    images: Tensor,
    *,
    num_views: int = 10,
    shift_ratio: float = 0.15,
    views: Views | None = None,
    generator: torch.Generator | None = None,
    features: ReadOut | None = None,
    views_per_forward: int = 1,
) -> Tensor:
    """Mean of the normed patch tokens over shifted and flipped views, for each cell over those that saw it.

    No gradient is recorded. Memory holds one sum and the features of ``views_per_forward`` views,
    never those of all; a view that comes twice is computed once and counted twice.

    Args:
        backbone: Any; its CLS token and registers are dropped.
        images: (B, 3, H, W) from ``backbone.preprocess``, height and width divisible by the patch
            size, any aspect. Outside of them the views are white in the backbone's normalisation.
        num_views, shift_ratio, generator: For ``sample_views``. One draw serves the whole batch,
            so that an image's features do not depend on the batch; the released code draws anew
            for every image, for which ``views`` takes a batch of draws.
        views: (offsets, flips) instead of a draw: (V, 2) whole numbers (dy, dx) in patches and
            (V,) bool for all images, or (B, V, 2) and (B, V) for each.
        features: Another read-out, (backbone, (b, 3, H, W)) -> (b, P, D), such as projected patches
            of CLIP; by default the patch tokens after the final norm.
        views_per_forward: Views of the batch in one forward pass. More keep a GPU busy; a CPU gains
            nothing.

    Returns:
        (B, P, D) float32 (float64 from a model in float64), row by row.

    Raises:
        ValueError: for images or views that do not fit, a cell that no view sees, and NaN or
            infinite values in images, weights or features.
    """
    return denoise_with_statistics(
        backbone,
        images,
        num_views=num_views,
        shift_ratio=shift_ratio,
        views=views,
        generator=generator,
        features=features,
        views_per_forward=views_per_forward,
    ).patches


@torch.no_grad()
def denoise_with_statistics(
    backbone: Backbone,
    images: Tensor,
    *,
    num_views: int = 10,
    shift_ratio: float = 0.15,
    views: Views | None = None,
    generator: torch.Generator | None = None,
    features: ReadOut | None = None,
    views_per_forward: int = 1,
) -> Denoised:
    """As ``denoise``, with the coverage of each cell and how much the features shrank."""
    if views_per_forward < 1:
        raise ValueError(f"views_per_forward is at least 1, got {views_per_forward}")
    images = _checked_images(backbone, images)
    grid_size = backbone.layout((images.shape[-2], images.shape[-1])).grid_size
    if views is None:
        views = sample_views(grid_size, num_views, shift_ratio, generator)
    offsets, flips = checked_views(views, grid_size, len(images))
    readout = features or normed_patches
    if offsets.ndim == 2:
        return _denoised(backbone, images, grid_size, offsets, flips, readout, views_per_forward)
    together = views_per_forward * len(images)  # as many views in a forward pass as with common views
    parts = [
        _denoised(backbone, image, grid_size, own_offsets, own_flips, readout, together)
        for image, own_offsets, own_flips in zip(torch.split(images, 1), offsets, flips, strict=True)
    ]
    shrinkages = [part.shrinkage for part in parts if part.shrinkage is not None]
    return Denoised(
        torch.cat([part.patches for part in parts]),
        torch.stack([part.coverage for part in parts]),
        torch.cat(shrinkages) if len(shrinkages) == len(parts) else None,
    )


def normed_patches(backbone: Backbone, images: Tensor) -> Tensor:
    """The read-out of PH-Reg for DINOv2: patch tokens after the final norm, (B, 3, H, W) -> (B, P, D)."""
    return backbone(images).patches


def checked_views(views: Views, grid_size: tuple[int, int], batch_size: int) -> tuple[Tensor, Tensor]:
    """Views as tensors on the CPU: offsets (..., V, 2) int64 and flips (..., V) bool.

    Raises:
        ValueError: for other shapes or types, an offset so large that its view sees nothing of the
            image, or cells that no view sees.
    """
    offsets, flips = (torch.as_tensor(part).cpu() for part in views)
    shape = tuple(offsets.shape)
    whole = not (offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool)
    fits = shape[-1:] == (2,) and (len(shape) == 2 or (len(shape) == 3 and shape[0] == batch_size)) and shape[-2] > 0
    if not fits or not whole:
        raise ValueError(
            f"offsets are whole numbers (dy, dx) in patches, (V, 2) or ({batch_size}, V, 2), "
            f"got {offsets.dtype} {shape}"
        )
    if flips.dtype != torch.bool or tuple(flips.shape) != shape[:-1]:
        raise ValueError(f"flips are bool {shape[:-1]}, one for each offset, got {flips.dtype} {tuple(flips.shape)}")
    offsets = offsets.long()
    beyond = (offsets.abs() >= torch.tensor(grid_size)).any(-1)
    if beyond.any():
        raise ValueError(
            f"a view shifted by {offsets[beyond].tolist().pop(0)} patches (dy, dx) sees nothing of a grid of "
            f"{grid_size[0]} rows x {grid_size[1]} cols; offsets are smaller than the grid"
        )
    for own in offsets if offsets.ndim == 3 else [offsets]:
        unseen = int((coverage(grid_size, own) == 0).sum())
        if unseen:
            raise ValueError(
                f"{unseen} of {grid_size[0] * grid_size[1]} cells are seen by no view; add the view (0, 0), unflipped"
            )
    return offsets, flips


def _checked_images(backbone: Backbone, images: Any) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != 3 or not len(images):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"images must be a (B, 3, H, W) tensor, B at least 1, got {got}; backbone.preprocess makes one"
        )
    if not images.is_floating_point():
        raise ValueError(f"images must be preprocessed floats, got {images.dtype}; call backbone.preprocess first")
    return images.to(device=backbone.device, dtype=backbone.dtype)  # views are built where they are used


def _denoised(
    backbone: Backbone,
    images: Tensor,
    grid_size: tuple[int, int],
    offsets: Tensor,
    flips: Tensor,
    readout: ReadOut,
    views_per_forward: int,
) -> Denoised:
    """All views of all images: (B, 3, H, W), (V, 2), (V,)."""
    white = [(1 - mean) / std for mean, std in zip(backbone.mean, backbone.std, strict=True)]
    counts = Counter((dy, dx, flip) for (dy, dx), flip in zip(offsets.tolist(), flips.tolist(), strict=True))
    distinct = list(counts)
    total, raw_length = None, None
    for start in range(0, len(distinct), views_per_forward):
        chunk = distinct[start : start + views_per_forward]
        parts = [view_of(images, (dy, dx), flip, backbone.patch_size, white) for dy, dx, flip in chunk]
        found = _checked_features(readout(backbone, torch.cat(parts) if len(parts) > 1 else parts.pop()), images, chunk)
        if total is None:
            wide = torch.promote_types(found.dtype, torch.float32)
            total = torch.zeros(len(images), *grid_size, found.shape[-1], dtype=wide, device=found.device)
        for view, own in zip(chunk, torch.split(found, len(images)), strict=True):
            if view == (0, 0, False):
                raw_length = _mean_length(own)
            accumulate(total, own, view[:2], view[2], counts[view])
        del found, own, parts  # before the next forward pass
    assert total is not None
    seen = coverage(grid_size, offsets)
    patches = total.div_(seen.to(total).unsqueeze(-1)).flatten(1, 2)  # (B, P, D)
    return Denoised(patches, seen, None if raw_length is None else _mean_length(patches) / raw_length)


def _checked_features(found: Any, images: Tensor, chunk: list[tuple[int, int, bool]]) -> Tensor:
    batch = len(images) * len(chunk)
    if not isinstance(found, Tensor) or found.ndim != 3 or len(found) != batch or not found.is_floating_point():
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"the read-out gives float patch features ({batch}, P, D), got {got}")
    if not torch.isfinite(found).all():
        raise ValueError(f"the read-out gave NaN or infinite features in a view of {chunk} (dy, dx, flip)")
    return found


def _mean_length(patches: Tensor) -> Tensor:
    """(B, P, D) -> (B,) mean length over the cells."""
    wide = torch.promote_types(patches.dtype, torch.float32)
    lengths: Tensor = patches.to(wide).norm(dim=-1)
    return lengths.mean(-1).clamp_min(torch.finfo(wide).tiny)
