"""Images of one size, where each came to lie, and how to take boxes and masks along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Where an image came to lie: fitted = scale * original + offset, in pixels.

    Attributes:
        original_size: (height, width), upright.
        scale: (y, x).
        offset: (y, x).
        action: What was done to it, in words; empty if nothing.
    """

    original_size: Size
    scale: tuple[float, float]
    offset: tuple[float, float]
    action: str = ""


@dataclass(frozen=True)
class FittedImages:
    """Images of one size, normalised, and which of their cells are real.

    Attributes:
        pixels: (B, 3, H, W) float32, normalised.
        valid: (B, rows, cols) bool; a cell is valid if at least half of it is image. Where a
            sliver of an image fills no cell by half, the fullest ones are.
        note: What was done, in words; empty if nothing.
        placements: One for each image.
    """

    pixels: Tensor
    valid: Tensor
    note: str = ""
    placements: tuple[Placement, ...] = ()

    @classmethod
    def cat(cls, parts: Sequence[FittedImages]) -> FittedImages:
        """Several batches as one.

        Raises:
            ValueError: if their sizes differ.
        """
        sizes = sorted({(part.pixels.shape[-2], part.pixels.shape[-1]) for part in parts})
        if len(sizes) != 1:
            raise ValueError(f"cannot join images of the sizes {sizes}; say image_size=(height, width)")
        placements = tuple(placement for part in parts for placement in part.placements)
        pixels, valid = torch.cat([part.pixels for part in parts]), torch.cat([part.valid for part in parts])
        return cls(pixels, valid, describe(placements), placements)

    def boxes_to_fitted(self, index: int, boxes: Sequence[Sequence[float]]) -> np.ndarray:
        """Boxes of an original image in its fitted frame.

        Args:
            index: The image.
            boxes: (k, 4) pixels (xmin, ymin, xmax, ymax), max exclusive.

        Returns:
            (k, 4) float64 in the same form, clipped to the frame; one that lies outside has no area.
        """
        place = self._placement(index)
        (scale_y, scale_x), (offset_y, offset_x) = place.scale, place.offset
        height, width = self.pixels.shape[-2:]
        scale, offset = np.array([scale_x, scale_y] * 2), np.array([offset_x, offset_y] * 2)
        moved = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * scale + offset
        clipped: np.ndarray = moved.clip(0, [width, height, width, height])
        return clipped

    def mask_to_fitted(self, index: int, mask: np.ndarray, *, fill: int = 0) -> np.ndarray:
        """A mask (h, w) of an original image in its fitted frame (H, W), by nearest neighbour.

        ``fill`` stands where the frame shows no image.

        Raises:
            ValueError: if the mask has not the size of the original image.
        """
        height, width = self.pixels.shape[-2:]
        return self._sampled(index, mask, np.arange(height) + 0.5, np.arange(width) + 0.5, fill)

    def foreground_cells(
        self, index: int, *, boxes: Sequence[Sequence[float]] = (), mask: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Cells whose centre lies on an object: bool (rows, cols).

        Args:
            index: The image.
            boxes: (k, 4) of the original image, (xmin, ymin, xmax, ymax), max exclusive.
            mask: (h, w) of the original image; objects are not 0.

        Returns:
            None if there is neither a box nor a mask.
        """
        if not len(boxes) and mask is None:
            return None
        height, width = self.pixels.shape[-2:]
        rows, cols = self.valid.shape[-2:]
        y, x = (np.arange(rows) + 0.5) * height / rows, (np.arange(cols) + 0.5) * width / cols
        found = np.zeros((rows, cols), dtype=bool)
        if mask is not None:
            found |= self._sampled(index, mask, y, x, 0) != 0
        for xmin, ymin, xmax, ymax in self.boxes_to_fitted(index, boxes):
            found |= np.outer((y >= ymin) & (y < ymax), (x >= xmin) & (x < xmax))
        return found

    def _placement(self, index: int) -> Placement:
        if not 0 <= index < len(self.placements):
            raise ValueError(f"image {index} has no placement; there are {len(self.placements)}")
        return self.placements[index]

    def _sampled(self, index: int, mask: np.ndarray, y: np.ndarray, x: np.ndarray, fill: int) -> np.ndarray:
        """Values of a mask of the original image at fitted coordinates: (len(y), len(x))."""
        place = self._placement(index)
        if mask.shape != place.original_size:
            raise ValueError(f"the mask is {mask.shape}, its image {place.original_size} (height, width)")
        rows = np.floor((y - place.offset[0]) / place.scale[0]).astype(int)
        cols = np.floor((x - place.offset[1]) / place.scale[1]).astype(int)
        inside = np.outer((rows >= 0) & (rows < mask.shape[0]), (cols >= 0) & (cols < mask.shape[1]))
        picked = mask[np.ix_(rows.clip(0, mask.shape[0] - 1), cols.clip(0, mask.shape[1] - 1))]
        sampled: np.ndarray = np.where(inside, picked, np.asarray(fill, dtype=mask.dtype))
        return sampled


def describe(placements: Sequence[Placement]) -> str:
    """What was done to images, in words, like ones together; empty if nothing."""
    groups: dict[str, list[Size]] = {}
    for place in placements:
        if place.action:
            groups.setdefault(place.action, []).append(place.original_size)
    said = []
    for action, sizes in groups.items():
        distinct = list(dict.fromkeys(sizes))
        named = ", ".join(as_text(size) for size in distinct[:3])
        more = f" and {len(distinct) - 3} more sizes" if len(distinct) > 3 else ""
        said.append(f"{len(sizes)} image{'s' * (len(sizes) > 1)} of {named}{more} {action}")
    return "; ".join(said) + (" (height x width)" if said else "")


def as_text(size: Size) -> str:
    """480x640, height first."""
    return f"{size[0]}x{size[1]}"
