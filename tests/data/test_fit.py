"""Sizes, policies and values of fitted images, against Pillow and naive loops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from regista.data.images import FittedImages, UnreadableImage, fit_images
from tests.tolerances import assert_close

MEAN, STD = (0.5, 0.25, 0.75), (0.5, 0.2, 0.3)
POLICIES = ("resize", "pad", "crop")
ROUNDING = 2.5 / 255  # Pillow rounds to whole levels twice
OVERSHOOT = 6 / 255  # and clips between the two directions, which shows where a few pixels are magnified


def fit(images: Any, **options: Any) -> FittedImages:
    return fit_images(
        images, **{"size": None, "default_size": (56, 84), "patch_size": 14, "mean": MEAN, "std": STD, **options}
    )


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    smooth = np.stack([y, x, np.sin(9 * x * y) / 2 + 0.5], -1) * 220 + random.uniform(0, 35, (height, width, 3))
    return Image.fromarray(smooth.astype(np.uint8))


def raw(fitted: FittedImages) -> Tensor:
    """Back to [0, 1]: (B, 3, H, W)."""
    return fitted.pixels * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def as_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)


@pytest.mark.parametrize("policy", [*POLICIES, "error"])
def test_right_size_is_only_normalised(policy: str) -> None:
    image = photo(56, 84)
    exact = (as_tensor(image).float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    floats = as_tensor(image).float() / 255
    for form in (image, np.asarray(image), as_tensor(image), floats, floats.numpy().transpose(1, 2, 0)):
        fitted = fit(form, policy=policy)
        assert torch.equal(fitted.pixels, exact[None])
        assert fitted.pixels.dtype == torch.float32
        assert fitted.note == ""
        assert fitted.valid.shape == (1, 4, 6)
        assert fitted.valid.all()


@pytest.mark.parametrize(
    ("policy", "size", "wanted"),
    [
        ("resize", (60, 62), (56, 56)),
        ("resize", (63, 64), (70, 70)),
        ("resize", (3, 100), (14, 98)),
        ("pad", (60, 56), (70, 56)),
        ("pad", (1, 15), (14, 28)),
        ("crop", (69, 56), (56, 56)),
        ("error", (28, 42), (28, 42)),
    ],
)
def test_target_sizes(policy: str, size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert fit(torch.zeros(2, 3, *size), policy=policy).pixels.shape == (2, 3, *wanted)
    if policy != "error":
        assert fit(photo(33, 44), size=size, policy=policy).pixels.shape == (1, 3, *wanted)


def test_own_or_default_size() -> None:
    image = photo(28, 42)
    assert fit(image).pixels.shape[-2:] == (56, 84)
    assert fit(np.asarray(image)).pixels.shape[-2:] == (28, 42)
    assert fit(as_tensor(image)).pixels.shape[-2:] == (28, 42)
    assert fit(as_tensor(image), size=(14, 14)).pixels.shape[-2:] == (14, 14)
    assert fit([np.asarray(image), image]).pixels.shape == (2, 3, 56, 84)
    assert fit(np.stack([np.asarray(image)] * 3)).pixels.shape == (3, 3, 28, 42)


def test_files_pil_and_grey_arrays_agree(tmp_path: Path) -> None:
    image = photo(40, 50)
    image.save(tmp_path / "a.png")
    wanted = fit(image).pixels
    assert torch.equal(fit(tmp_path / "a.png").pixels, wanted)
    assert torch.equal(fit([str(tmp_path / "a.png"), image]).pixels, torch.cat([wanted, wanted]))
    grey = np.asarray(image.convert("L"))
    assert torch.equal(fit(grey).pixels, fit(np.stack([grey] * 3, -1)).pixels)
    assert torch.equal(fit(Image.fromarray(grey)).pixels, fit(Image.fromarray(grey).convert("RGB")).pixels)


@pytest.mark.parametrize("size", [(30, 40), (300, 200), (57, 83)])
def test_resize_is_pillows(size: tuple[int, int]) -> None:
    image = photo(*size)
    wanted = as_tensor(image.resize((84, 56), Image.Resampling.BICUBIC)).float() / 255
    assert_close(raw(fit(image))[0], wanted)
    assert (raw(fit(as_tensor(image), size=(56, 84)))[0] - wanted).abs().max() < ROUNDING


@pytest.mark.parametrize("size", [(30, 40), (300, 200), (57, 83), (20, 400)])
def test_pad_keeps_the_aspect(size: tuple[int, int]) -> None:
    image = photo(*size)
    ratio = min(56 / size[0], 84 / size[1])
    inner = round(size[0] * ratio), round(size[1] * ratio)
    wanted = as_tensor(image.resize((inner[1], inner[0]), Image.Resampling.BICUBIC)).float() / 255
    for form in (image, as_tensor(image)):
        fitted = fit(form, size=(56, 84), policy="pad")
        assert (raw(fitted)[0, :, : inner[0], : inner[1]] - wanted).abs().max() < ROUNDING
        assert (fitted.pixels[0, :, inner[0] :] == 0).all()
        assert (fitted.pixels[0, :, :, inner[1] :] == 0).all()
        assert fitted.pixels[0, :, : inner[0], : inner[1]].abs().max() > 0.1


@pytest.mark.parametrize("size", [(30, 40), (300, 200), (57, 83), (20, 400)])
def test_crop_is_cover_then_centre(size: tuple[int, int]) -> None:
    image = photo(*size)
    ratio = max(56 / size[0], 84 / size[1])
    whole = max(56, round(size[0] * ratio)), max(84, round(size[1] * ratio))
    top, left = (whole[0] - 56) // 2, (whole[1] - 84) // 2
    covering = image.resize((whole[1], whole[0]), Image.Resampling.BICUBIC)
    wanted = as_tensor(covering.crop((left, top, left + 84, top + 56))).float() / 255
    for form in (image, as_tensor(image)):
        assert (raw(fit(form, size=(56, 84), policy="crop"))[0] - wanted).abs().max() < ROUNDING


def test_own_size_is_padded_and_cropped_without_scaling() -> None:
    image = as_tensor(photo(60, 50))
    exact = image.float() / 255
    padded = fit(image, policy="pad")
    assert padded.pixels.shape == (1, 3, 70, 56)
    assert_close(raw(padded)[0, :, :60, :50], exact)
    assert (padded.pixels[0, :, 60:] == 0).all()
    cropped = fit(image, policy="crop")
    assert cropped.pixels.shape == (1, 3, 56, 42)
    assert_close(raw(cropped)[0], exact[:, 2:58, 4:46])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [(30, 2000), (2000, 30), (1, 3000), (1, 1), (2, 2)])
def test_extreme_aspects(policy: str, size: tuple[int, int]) -> None:
    image = photo(*size)
    by_pillow, by_torch = (fit(form, size=(70, 56), policy=policy) for form in (image, as_tensor(image)))
    for fitted in (by_pillow, by_torch):
        assert fitted.pixels.shape == (1, 3, 70, 56)
        assert fitted.valid.any()
        assert torch.isfinite(fitted.pixels).all()
        assert raw(fitted).min() > -1e-6
        assert raw(fitted).max() < 1 + 1e-6
    assert by_pillow.placements == by_torch.placements
    assert (raw(by_pillow) - raw(by_torch)).abs().max() < OVERSHOOT
    if policy != "pad":
        assert by_torch.valid.all()


def test_long_tensors_are_not_scaled_up_whole() -> None:
    """What is cut off before scaling must not show: the same crop as of the whole."""
    image = torch.rand(3, 20, 3001)
    whole = round(3001 * 56 / 20)
    resized = torch.nn.functional.interpolate(image[None], size=(56, whole), mode="bicubic", antialias=True).clamp(0, 1)
    wanted = resized[..., (whole - 84) // 2 : (whole - 84) // 2 + 84]
    fitted = fit(image, size=(56, 84), policy="crop")
    assert (raw(fitted) - wanted).abs().max() < 0.25  # sizes are whole pixels: shifted by half a pixel at most
    assert (raw(fitted) - wanted).abs().mean() < 0.05
    place = fitted.placements[0]
    assert abs((1500.5 * place.scale[1] + place.offset[1]) - 42) < 1  # the centre stays the centre


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["pil", "tensor"])
def test_three_are_three_times_one(policy: str, kind: str) -> None:
    images = [photo(60, 50, seed) for seed in range(3)]
    forms: Any = images if kind == "pil" else torch.stack([as_tensor(image) for image in images])
    together = fit(forms, policy=policy)
    for index in range(3):
        alone = fit(forms[index], policy=policy)
        assert torch.equal(together.pixels[index : index + 1], alone.pixels)
        assert torch.equal(together.valid[index : index + 1], alone.valid)


def test_gradient_passes() -> None:
    image = torch.rand(1, 3, 60, 50, requires_grad=True)
    fit(image, policy="resize").pixels.sum().backward()
    assert image.grad is not None
    assert image.grad.abs().min() > 0


def test_input_is_left_alone() -> None:
    array = np.asarray(photo(56, 84)).copy()
    before = array.copy()
    fitted = fit(array)
    fitted.pixels.zero_()
    assert np.array_equal(array, before)
    floats = torch.rand(1, 3, 28, 28)
    kept = floats.clone()
    fit(floats).pixels.zero_()
    assert torch.equal(floats, kept)


@pytest.mark.parametrize("size", [(15, 29), (21, 21), (20, 7), (6, 40), (70, 1)])
def test_valid_cells_count_pixels(size: tuple[int, int]) -> None:
    fitted = fit(torch.rand(1, 3, *size), policy="pad")
    height, width = fitted.pixels.shape[-2:]
    share = torch.zeros(height // 14, width // 14)
    for row in range(height // 14):
        for col in range(width // 14):
            pixels = [(y, x) for y in range(row * 14, row * 14 + 14) for x in range(col * 14, col * 14 + 14)]
            share[row, col] = sum(y < size[0] and x < size[1] for y, x in pixels) / 14**2
    wanted = share >= 0.5 if (share >= 0.5).any() else share == share.max()
    assert torch.equal(fitted.valid[0], wanted)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (torch.rand(3, 28, 28) * 4 - 2, {}, "image 0.*already normalised"),
        ([torch.rand(3, 28, 28), torch.full((3, 28, 28), 1.002)], {}, "image 1.*already normalised"),
        (torch.full((3, 28, 28), float("nan")), {}, "image 0 has NaN"),
        (torch.zeros(3, 28, 28, dtype=torch.int64), {}, "uint8 or float"),
        (np.zeros((28, 28, 3), np.uint16), {}, "uint8 or float"),
        (np.zeros((28, 28, 4), np.uint8), {}, re.escape("(28, 28, 4)")),
        (torch.zeros(1, 28, 28), {}, re.escape("(1, 28, 28)")),
        (torch.zeros(3, 0, 28), {}, "image 0"),
        ([], {}, "no images"),
        (torch.zeros(0, 3, 28, 28), {}, "no images"),
        ([torch.zeros(3, 28, 28), torch.zeros(3, 28, 42)], {}, "unlike sizes.*image_size"),
        (torch.zeros(3, 28, 28), {"policy": "squash"}, "policy is one of.*squash"),
        (torch.zeros(3, 28, 30), {"policy": "error"}, "28x30 is not divisible by the patch size 14"),
        (torch.zeros(3, 28, 28), {"policy": "error", "size": (28, 42)}, "28x28 would have to change to 28x42"),
        (photo(28, 28), {"policy": "error"}, "28x28 would have to change to 56x84"),
        (torch.zeros(3, 13, 40), {"policy": "crop"}, "13x40 is smaller than one patch of 14"),
        (torch.zeros(3, 28, 28), {"size": (0, 14)}, "both positive"),
    ],
)
def test_errors(images: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(images, **options)


def test_values_just_outside_pass() -> None:
    assert fit(torch.full((3, 28, 28), 1.0005)).note == ""


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(UnreadableImage, match=r"bad\.png"):
        fit([photo(28, 28), tmp_path / "bad.png"])


DOES_NOT = "as the patch of 14 does not divide"


@pytest.mark.parametrize(
    ("images", "options", "wanted"),
    [
        ([photo(48, 64)] * 3, {}, "3 images of 48x64 resized to 56x84, aspect not kept"),
        (photo(28, 42), {}, "1 image of 28x42 resized to 56x84"),
        (photo(28, 42), {"policy": "pad"}, "1 image of 28x42 scaled and padded to 56x84"),
        (photo(70, 70), {"size": (71, 72)}, f"1 image of 70x70 kept at 70x70, {DOES_NOT} 71x72"),
        (
            np.zeros((60, 56, 3), np.uint8),
            {"policy": "crop"},
            f"1 image of 60x56 cropped at the centre to 56x56, {DOES_NOT} 60x56",
        ),
        (
            [photo(side, 84) for side in (56, 57, 58, 59, 60, 61)],
            {},
            "5 images of 57x84, 58x84, 59x84 and 2 more sizes resized to 56x84, aspect not kept",
        ),
    ],
)
def test_notes(images: Any, options: dict[str, Any], wanted: str) -> None:
    assert fit(images, **options).note == wanted + " (height x width)"
