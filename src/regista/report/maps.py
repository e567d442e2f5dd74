"""Maps over the patch grid as small pictures: colours, scales, outlines, data URIs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image

from regista.report.formatting import round_number

LONG_SIDE = 288
PHOTO_SIDE = 400
GREY_SIDE = 288
STOPS = 24
NORM_COLOURS = "inferno"
LEAST_RANGE = 4.0
LOG_FROM = 10.0


@dataclass(frozen=True)
class Scale:
    """How values become colours.

    Attributes:
        low, high: Values of the first and the last colour.
        colours: Name of a matplotlib colour map.
        log: Equal steps of colour are equal ratios.
    """

    low: float
    high: float
    colours: str
    log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Values as places on the scale, 0 to 1, those outside at its ends."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log(np.maximum(values, low)), np.log(low), np.log(high)
        found: np.ndarray = np.clip((values - low) / max(high - low, 1e-30), 0, 1)
        return found

    def ticks(self) -> list[tuple[float, str]]:
        """(place in percent, label) of a few round values."""
        locator = LogLocator(subs=(1, 2, 5)) if self.log else MaxNLocator(nbins=5)
        inside = [value for value in locator.tick_values(self.low, self.high) if self.low <= value <= self.high]
        return [
            (self.percent(value), round_number(round(float(value), 12))) for value in inside[:: 1 + len(inside) // 9]
        ]

    def percent(self, value: float) -> float:
        """A value's place on the scale in percent."""
        return round(100 * float(self.place(np.asarray(value))), 2)

    def gradient(self) -> str:
        """The colours as a CSS gradient from left to right."""
        table = colormaps[self.colours]
        stops = [table(index / (STOPS - 1), bytes=True) for index in range(STOPS)]
        return f"linear-gradient(to right, {', '.join('#{:02x}{:02x}{:02x}'.format(*stop[:3]) for stop in stops)})"


def norm_scale(norms: np.ndarray, median: float | None) -> Scale:
    """Colours for norms that start at 0 and go to 4 times the median at least.

    So the spread of a healthy model stays faint and outliers are bright. From 10 times the
    median on the scale is logarithmic.
    """
    middle = median or float(np.median(norms))
    high = max(float(norms.max()), LEAST_RANGE * middle, 1e-12)
    if middle > 0 and high > LOG_FROM * middle:
        return Scale(middle / 2, high, NORM_COLOURS, log=True)
    return Scale(0.0, high, NORM_COLOURS)


def map_uri(values: np.ndarray, scale: Scale) -> str:
    """A PNG of (rows, cols) values, every patch a square of even colour."""
    table = np.round(255 * colormaps[scale.colours](np.arange(256) / 255)[:, :3]).astype(np.uint8)
    index = np.round(255 * scale.place(np.asarray(values, dtype=np.float64))).astype(np.uint8)
    picture = Image.fromarray(_enlarged(index), mode="P")
    picture.putpalette(table.tobytes())
    return _uri(picture, "PNG", optimize=True)


def colour_uri(values: np.ndarray) -> str:
    """A PNG of (rows, cols, 3) colours in [0, 1], every patch a square of even colour."""
    return _uri(Image.fromarray(_enlarged(colour_bytes(values))), "PNG", optimize=True)


def colour_bytes(values: np.ndarray) -> np.ndarray:
    """Colours in [0, 1] as bytes."""
    return np.round(255 * np.clip(np.asarray(values, dtype=np.float64), 0, 1)).astype(np.uint8)


def photo_uri(pixels: np.ndarray, *, grey: bool = False) -> str:
    """A JPEG of (height, width, 3) bytes; ``grey`` gives a dim one for marks to stand out on."""
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    side = GREY_SIDE if grey else PHOTO_SIDE
    shrink = side / max(picture.size)
    if shrink < 1:
        width, height = (max(1, round(length * shrink)) for length in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return _uri(dimmed(picture) if grey else picture, "JPEG", quality=84, optimize=True)


def dimmed(picture: Image.Image) -> Image.Image:
    """A grey, dark version of a photo."""
    return picture.convert("L").point([40 + round(0.42 * value) for value in range(256)])


def cell_path(mask: np.ndarray) -> str:
    """An SVG path that fills the cells of a (rows, cols) mask, one unit a cell; "" for none."""
    return "".join(f"M{col} {row}h1v1h-1z" for row, col in np.argwhere(mask))


def border_lines(mask: np.ndarray) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Sides of cells along the border of a (rows, cols) mask, as pairs of points (x, y), one unit a cell."""
    inside = np.pad(np.asarray(mask, dtype=bool), 1)
    across = np.argwhere(inside[1:, 1:-1] != inside[:-1, 1:-1]).tolist()
    down = np.argwhere(inside[1:-1, 1:] != inside[1:-1, :-1]).tolist()
    return [((x, y), (x + 1, y)) for y, x in across] + [((x, y), (x, y + 1)) for y, x in down]


def outline_path(mask: np.ndarray) -> str:
    """An SVG path along the border of a (rows, cols) mask, one unit a cell; "" for none."""
    return "".join(f"M{x} {y}" + ("h1" if end_y == y else "v1") for (x, y), (_, end_y) in border_lines(mask))


def _enlarged(values: np.ndarray) -> np.ndarray:
    factor = max(1, -(-LONG_SIDE // max(values.shape[:2])))
    return np.ascontiguousarray(values.repeat(factor, 0).repeat(factor, 1))


def _uri(picture: Image.Image, kind: str, **options: int | bool) -> str:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
