"""Boxes and masks go where the pixels go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regista.data.images import FittedImages, fit_images

POLICIES = ("resize", "pad", "crop")


def fit(images: Any, **options: Any) -> FittedImages:
    fixed = {"default_size": (56, 84), "patch_size": 14, "mean": (0, 0, 0), "std": (1, 1, 1)}
    return fit_images(images, **{"size": None, **fixed, **options})


def marked(height: int, width: int, box: tuple[int, int, int, int]) -> Image.Image:
    """White in the box (xmin, ymin, xmax, ymax), black elsewhere."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    xmin, ymin, xmax, ymax = box
    pixels[ymin:ymax, xmin:xmax] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("size", [(200, 300), (250, 170), (40, 30), (60, 800)])
def test_boxes_and_masks_follow_the_pixels(policy: str, as_tensor: bool, size: tuple[int, int]) -> None:
    """Where the fitted picture is bright, there lie the fitted box and mask."""
    height, width = size
    box = (width * 4 // 9, height // 4, width * 5 // 9, height * 3 // 4)
    image = marked(height, width, box)
    pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)
    fitted = fit([pixels if as_tensor else image], size=(70, 98), policy=policy)
    bright = (fitted.pixels[0, 0] > 0.5).numpy()
    assert bright.any()
    rows, cols = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    wanted = np.array([cols[0], rows[0], cols[-1] + 1, rows[-1] + 1])
    moved = fitted.boxes_to_fitted(0, [box])
    assert moved.shape == (1, 4)
    assert np.abs(moved[0] - wanted).max() <= 1
    mask = fitted.mask_to_fitted(0, np.asarray(image)[..., 0] > 0)
    assert mask.dtype == bool
    assert mask.shape == (70, 98)
    assert (mask != bright).mean() < 0.04  # edges of half a pixel


def test_own_size_moves_by_whole_pixels() -> None:
    mask = np.arange(60 * 50).reshape(60, 50)
    padded = fit(np.zeros((60, 50, 3), np.uint8), policy="pad")
    assert np.array_equal(padded.boxes_to_fitted(0, [[3, 5, 50, 60]]), [[3, 5, 50, 60]])
    moved = padded.mask_to_fitted(0, mask, fill=-1)
    assert np.array_equal(moved[:60, :50], mask)
    assert (moved[60:] == -1).all()
    assert (moved[:, 50:] == -1).all()
    cropped = fit(np.zeros((60, 50, 3), np.uint8), policy="crop")
    assert np.array_equal(
        cropped.boxes_to_fitted(0, [[3, 5, 50, 60], [10, 10, 20, 20]]), [[0, 3, 42, 56], [6, 8, 16, 18]]
    )
    assert np.array_equal(cropped.mask_to_fitted(0, mask), mask[2:58, 4:46])


def test_each_image_has_its_own_place() -> None:
    images = [Image.new("RGB", size) for size in ((100, 50), (50, 100))]
    fitted = fit(images, policy="pad")
    first, second = (fitted.boxes_to_fitted(index, [[0, 0, *images[index].size]])[0] for index in (0, 1))
    assert first.tolist() == pytest.approx([0, 0, 84, 42])
    assert second.tolist() == pytest.approx([0, 0, 28, 56])


def test_boxes_outside_keep_their_rank_and_have_no_area() -> None:
    fitted = fit(Image.new("RGB", (400, 100)), policy="crop")  # the middle 150 columns stay
    boxes = fitted.boxes_to_fitted(0, [[0, 0, 50, 50], [150, 0, 250, 100], [390, 0, 400, 100]])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert width[0] == width[2] == 0
    assert width[1] > 50
    assert height[1] == 56
    assert fitted.boxes_to_fitted(0, []).shape == (0, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_foreground_cells_by_their_centres(policy: str) -> None:
    height, width, box = 150, 200, (37, 22, 161, 90)
    fitted = fit(Image.new("RGB", (width, height)), policy=policy)
    place = fitted.placements[0]
    wanted = np.zeros((4, 6), dtype=bool)
    for row in range(4):
        for col in range(6):
            y = ((row * 14 + 7) - place.offset[0]) / place.scale[0]
            x = ((col * 14 + 7) - place.offset[1]) / place.scale[1]
            wanted[row, col] = box[0] <= x < box[2] and box[1] <= y < box[3]
    assert 0 < wanted.sum() < 24
    mask = np.zeros((height, width), np.uint8)
    mask[box[1] : box[3], box[0] : box[2]] = 7
    assert np.array_equal(fitted.foreground_cells(0, boxes=[box]), wanted)
    assert np.array_equal(fitted.foreground_cells(0, mask=mask), wanted)
    assert np.array_equal(fitted.foreground_cells(0, boxes=[(0, 0, 1, 1)], mask=mask), wanted)
    assert fitted.foreground_cells(0) is None
    outside = fitted.foreground_cells(0, boxes=[(0, 0, 1, 1)])
    assert outside is not None
    assert not outside.any()


def test_upper_edge_is_exclusive() -> None:
    fitted = fit(np.zeros((28, 28, 3), np.uint8))
    assert fitted.foreground_cells(0, boxes=[(0, 0, 7, 28)]).sum() == 0  # type: ignore[union-attr]
    assert fitted.foreground_cells(0, boxes=[(7, 0, 21, 28)]).sum() == 2  # type: ignore[union-attr]


def test_cat_is_one_batch() -> None:
    images = [Image.new("RGB", size, (index, 9, 9)) for index, size in enumerate([(100, 50), (84, 56), (100, 50)])]
    together, joined = fit(images, policy="pad"), FittedImages.cat([fit(image, policy="pad") for image in images])
    assert torch.equal(joined.pixels, together.pixels)
    assert torch.equal(joined.valid, together.valid)
    assert joined.placements == together.placements
    assert joined.note == together.note == "2 images of 50x100 scaled and padded to 56x84 (height x width)"
    with pytest.raises(ValueError, match="cannot join images of the sizes"):
        FittedImages.cat([together, fit(images, size=(28, 28))])


def test_errors() -> None:
    fitted = fit(np.zeros((28, 42, 3), np.uint8))
    with pytest.raises(ValueError, match=r"mask is \(42, 28\), its image \(28, 42\)"):
        fitted.mask_to_fitted(0, np.zeros((42, 28)))
    with pytest.raises(ValueError, match="image 1 has no placement"):
        fitted.boxes_to_fitted(1, [[0, 0, 1, 1]])
