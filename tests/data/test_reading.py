"""Every kind of image file loads by value, and every bad one is named."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.data.images import (
    UnreadableImage,
    files_digest,
    find_images,
    load_image,
    load_images,
    skipped_files,
    unique_files,
)
from regista.data.reading import to_rgb
from regista.data.skipping import tell_skipped

# Four quadrants, so that any turn, flip or inversion shows: rows, then columns.
COLOURS = np.array([[[250, 10, 10], [10, 250, 10]], [[10, 10, 250], [240, 240, 30]]], dtype=np.uint8)
GREYS = np.array([[0, 60], [130, 255]], dtype=np.uint8)
COLOUR = Image.fromarray(COLOURS.repeat(8, 0).repeat(8, 1))
GREY = Image.fromarray(GREYS.repeat(8, 0).repeat(8, 1))


def quadrants(image: Image.Image) -> np.ndarray:
    """The middle pixel of each quadrant: (2, 2, 3)."""
    assert image.mode == "RGB"
    height, width = image.height, image.width
    return np.asarray(image)[[height // 4, 3 * height // 4]][:, [width // 4, 3 * width // 4]].astype(int)


def assert_quadrants(image: Image.Image, wanted: np.ndarray, within: int = 0) -> None:
    wanted = wanted if wanted.ndim == 3 else np.stack([wanted] * 3, -1)
    assert np.abs(quadrants(image) - wanted.astype(int)).max() <= within, quadrants(image)


def opaque(image: Image.Image, top_left: int) -> Image.Image:
    """With an alpha channel: ``top_left`` in that quadrant, opaque elsewhere."""
    alpha = np.full((16, 16), 255, dtype=np.uint8)
    alpha[:8, :8] = top_left
    image = image.copy()
    image.putalpha(Image.fromarray(alpha))
    return image


@pytest.mark.parametrize(
    ("name", "image", "options", "wanted", "within"),
    [
        ("rgb.png", COLOUR, {}, COLOURS, 0),
        ("rgb.jpg", COLOUR, {"quality": 95, "subsampling": 0}, COLOURS, 12),
        ("rgb.webp", COLOUR, {"lossless": True}, COLOURS, 0),
        ("rgb.bmp", COLOUR, {}, COLOURS, 0),
        ("rgb.tif", COLOUR, {"compression": "tiff_lzw"}, COLOURS, 0),
        ("grey.png", GREY, {}, GREYS, 0),
        ("one_bit.png", GREY.point(lambda value: 255 * (value > 100)).convert("1"), {}, 255 * (GREYS > 100), 0),
        ("palette.png", COLOUR.quantize(4), {}, COLOURS, 8),
        ("cmyk.tif", COLOUR.convert("CMYK"), {}, COLOURS, 2),
        ("cmyk.jpg", COLOUR.convert("CMYK"), {"quality": 98}, COLOURS, 40),
        ("ycbcr.tif", COLOUR.convert("YCbCr"), {}, COLOURS, 3),
    ],
)
def test_modes(tmp_path: Path, name: str, image: Image.Image, options: dict, wanted: np.ndarray, within: int) -> None:
    image.save(tmp_path / name, **options)
    assert_quadrants(load_image(tmp_path / name), wanted, within)


@pytest.mark.parametrize("name", ["rgba.png", "rgba.webp", "rgba.tif"])
def test_transparency_lies_over_white(tmp_path: Path, name: str) -> None:
    opaque(COLOUR, 0).save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    wanted = COLOURS.copy()
    wanted[0, 0] = 255
    assert_quadrants(load_image(tmp_path / name), wanted)


def test_half_transparency_and_grey_alpha(tmp_path: Path) -> None:
    opaque(GREY, 128).save(tmp_path / "la.png")
    wanted = GREYS.copy()
    wanted[0, 0] = round(0 * 128 / 255 + 255 * 127 / 255)
    assert_quadrants(load_image(tmp_path / "la.png"), wanted, 1)


def test_palette_and_colour_key_transparency(tmp_path: Path) -> None:
    palette = COLOUR.quantize(4)
    key = palette.getpixel((2, 2))
    palette.save(tmp_path / "palette.png", transparency=key)
    palette.save(tmp_path / "palette.gif", transparency=key)
    COLOUR.save(tmp_path / "rgb.png", transparency=(250, 10, 10))
    GREY.save(tmp_path / "grey.png", transparency=0)
    wanted, grey = COLOURS.copy(), GREYS.copy()
    wanted[0, 0], grey[0, 0] = 255, 255
    for name in ("palette.png", "palette.gif", "rgb.png"):
        assert_quadrants(load_image(tmp_path / name), wanted, 8)
    assert_quadrants(load_image(tmp_path / "grey.png"), grey)


@pytest.mark.parametrize("darkest_only", [False, True])
@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_are_scaled(tmp_path: Path, name: str, darkest_only: bool) -> None:
    values = np.array([[0, 20000], [40000, 65535]]) if not darkest_only else np.array([[0, 60], [130, 255]])
    Image.fromarray(values.astype(np.uint16).repeat(8, 0).repeat(8, 1)).save(tmp_path / name)
    assert_quadrants(load_image(tmp_path / name), np.rint(values / 65535 * 255))


def test_integers_of_32_bits() -> None:
    for values in (np.array([[0, 300], [40000, 65535]]), np.array([[0, 2**20], [2**21, 2**22]])):
        white = max(65535, values.max())
        image = Image.fromarray(values.astype(np.int32).repeat(8, 0).repeat(8, 1))
        assert image.mode == "I"
        assert_quadrants(to_rgb(image), np.rint(values / white * 255))


@pytest.mark.parametrize("white", [1, 255, 65535])
def test_float_tiff(tmp_path: Path, white: float) -> None:
    values = np.array([[0, 0.25], [0.5, 1]]) * white
    Image.fromarray(values.astype(np.float32).repeat(8, 0).repeat(8, 1)).save(tmp_path / "float.tif")
    assert_quadrants(load_image(tmp_path / "float.tif"), np.rint(values / white * 255))


def test_float_overshoot_and_nan_do_not_darken() -> None:
    values = np.array([[-0.2, np.nan], [0.5, 1.2]], dtype=np.float32)
    assert_quadrants(to_rgb(Image.fromarray(values.repeat(8, 0).repeat(8, 1))), np.array([[0, 0], [128, 255]]))


@pytest.mark.parametrize("name", ["moving.gif", "moving.webp", "moving.png", "pages.tif"])
def test_first_frame(tmp_path: Path, name: str) -> None:
    options = {"lossless": True} if name.endswith("webp") else {}
    COLOUR.save(tmp_path / name, save_all=True, append_images=[COLOUR.rotate(90), COLOUR.rotate(180)], **options)
    assert_quadrants(load_image(tmp_path / name), COLOURS, 8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    """The file holds the picture turned; the tag says how to turn it back."""
    undo = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    tall = np.asarray(COLOUR.resize((16, 32), Image.Resampling.NEAREST))
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(undo(tall))).save(tmp_path / "turned.png", exif=exif)
    loaded = load_image(tmp_path / "turned.png")
    assert loaded.size == (16, 32)
    assert_quadrants(loaded, COLOURS)


def test_broken_exif_does_not_spoil_the_pixels(tmp_path: Path) -> None:
    COLOUR.save(tmp_path / "odd.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xffjunk")
    assert_quadrants(load_image(tmp_path / "odd.png"), COLOURS)


def encoded(kind: str, **options: object) -> bytes:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, kind, **options)
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.jpg": (lambda path: path.touch(), "empty"),
    "missing.jpg": (lambda path: None, "no such file"),
    "folder.jpg": (lambda path: path.mkdir(), "folder"),
    "pipe.jpg": (os.mkfifo, "not a regular file"),
    "words.jpg": (lambda path: path.write_text("not a picture at all"), "not an image"),
    "half.jpg": (lambda path: path.write_bytes(encoded("JPEG")[:1500]), "truncated"),
    "half.png": (lambda path: path.write_bytes(encoded("PNG")[:4000]), "cannot be read"),
    "half.webp": (lambda path: path.write_bytes(encoded("WEBP")[:1000]), "cannot be read|not an image"),
    "half.gif": (lambda path: path.write_bytes(encoded("GIF")[:2000]), "cannot be read"),
    "half.tif": (lambda path: path.write_bytes(encoded("TIFF")[:3000]), "cannot be read|not an image"),
    "half.bmp": (lambda path: path.write_bytes(encoded("BMP")[:3000]), "cannot be read"),
    "header.png": (lambda path: path.write_bytes(encoded("PNG")[:20]), "cannot be read|not an image"),
    "bomb.png": (lambda path: path.write_bytes(png_that_claims(60000, 60000)), "bomb"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(tmp_path: Path, name: str) -> None:
    make, reason = BAD[name]
    make(tmp_path / name)
    with pytest.raises(UnreadableImage, match=reason) as caught:
        load_image(tmp_path / name)
    error = caught.value
    assert str(error) == f"{tmp_path / name}: {error.reason}"
    assert str(tmp_path) not in error.reason
    assert "\n" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.path, copy.reason) == (error.path, error.reason)


def test_a_name_no_file_can_have() -> None:
    with pytest.raises(UnreadableImage):
        load_image("a" * 5000)
    with pytest.raises(UnreadableImage):
        load_image("nul\0.png")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.png", "a.JPG", "deep/er/c.png", "deep/notes.txt", ".hidden/d.png", "._e.png", "odd[1].png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        COLOUR.save(tmp_path / name, "PNG")
    (tmp_path / "nothing").mkdir()
    return tmp_path


def names(found: list[Path], tree: Path) -> list[str]:
    return [path.relative_to(tree).as_posix() for path in found]


def test_find_images(tree: Path) -> None:
    assert names(find_images(tree), tree) == ["a.JPG", "b.png", "deep/er/c.png", "odd[1].png"]
    assert names(find_images([tree / "b.png", str(tree / "deep")]), tree) == ["b.png", "deep/er/c.png"]
    assert names(find_images([f"{tree}/*.png"]), tree) == ["b.png", "odd[1].png"]
    assert names(find_images([f"{tree}/**/*.png"]), tree) == ["b.png", "deep/er/c.png", "odd[1].png"]
    assert names(find_images([f"{tree}/d*"]), tree) == ["deep/er/c.png"]
    assert names(find_images([tree / "odd[1].png"]), tree) == ["odd[1].png"]
    assert names(find_images([tree / "deep/notes.txt"]), tree) == ["deep/notes.txt"]
    assert names(find_images([tree / "b.png"] * 2), tree) == ["b.png", "b.png"]


@pytest.mark.parametrize("bad", ["gone", "gone/*.png", "nothing"])
def test_find_images_names_what_is_not_there(tree: Path, bad: str) -> None:
    with pytest.raises(ValueError, match=bad.replace("*", r"\*")):
        find_images([tree / "b.png", tree / bad])


def test_load_images_skips_and_counts(tree: Path) -> None:
    (tree / "bad.png").write_bytes(b"")
    loaded = load_images([tree])
    assert names(loaded.paths, tree) == ["a.JPG", "b.png", "deep/er/c.png", "odd[1].png"]
    assert len(loaded.images) == 4
    assert loaded.skipped == [(tree / "bad.png", "the file is empty")]
    with pytest.raises(ValueError, match=r"none of 1 image.*bad\.png: the file is empty"):
        load_images([tree / "bad.png"])


def test_a_float_image_without_a_finite_pixel_is_unreadable(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), np.nan, np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(UnreadableImage, match=r"nan\.tiff"):
        load_image(tmp_path / "nan.tiff")


def test_a_file_counts_once_by_whatever_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    for path in (first, second):
        path.write_bytes(b"x")
    (tmp_path / "link.png").symlink_to(first)
    again = tmp_path / "." / ".." / tmp_path.name / "a.png"
    assert unique_files([first, second, again, tmp_path / "link.png", second]) == [first, second]
    assert files_digest([first, second]) == files_digest([first, second]) != files_digest([second, first])


def test_skipped_files_are_told_to_all_who_listen(tmp_path: Path) -> None:
    tell_skipped("nobody listens", "so what")
    with skipped_files() as outer:
        tell_skipped(tmp_path / "a", "torn")
        with skipped_files() as inner:
            tell_skipped(tmp_path / "b", "empty")
            tell_skipped(tmp_path / "b", "empty")
    tell_skipped("late", "nobody listens")
    assert inner == {str(tmp_path / "b"): "empty"}
    assert outer == {str(tmp_path / "a"): "torn", str(tmp_path / "b"): "empty"}
