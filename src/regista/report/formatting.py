"""Numbers and names as people read them."""

from __future__ import annotations

import math
from pathlib import PurePosixPath, PureWindowsPath

NONE = "–"


def percent(share: float | None) -> str:
    """0.0213 -> "2.1 %"; "–" for None."""
    if share is None:
        return NONE
    value = 100 * share
    if value == 0 or abs(value) >= 9.95:
        return f"{value:.0f} %"
    if abs(value) >= 0.095:
        return f"{value:.1f} %".replace(".0 %", " %")
    return f"{value:.2f} %" if abs(value) >= 0.01 else "under 0.01 %"


def figure(value: float | None) -> str:
    """A number with three digits that count: 297.41 -> "297", 5.8231 -> "5.82"; "–" for None."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:,.{digits}f}"


def round_number(value: float) -> str:
    """A round value of an axis: 80.0 -> "80", 0.05 -> "0.05", 2000.0 -> "2,000"."""
    return f"{value:,g}"


def times(ratio: float | None) -> str:
    """5.8231 -> "5.8x"; "–" for None."""
    if ratio is None:
        return NONE
    return f"{ratio:,.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x"


def count(number: int, noun: str) -> str:
    """1 -> "1 image", 6 -> "6 images"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def block_range(first: int, last: int) -> str:
    """Blocks in words: "at block 4" or "from block 4 to 9"."""
    return f"at block {first}" if first == last else f"from block {first} to {last}"


def size_text(size: tuple[int, int] | None, unit: str = "") -> str:
    """(rows, cols) -> "37 x 37"."""
    return NONE if size is None else f"{size[0]} x {size[1]}{unit}"


def file_name(path: str) -> str:
    """The last part of a path, of whatever system it came from."""
    name = PureWindowsPath(PurePosixPath(path).name).name
    return name or path


def printable(text: str) -> str:
    """One line without control characters: a file name must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def shortened(text: str, most: int) -> str:
    """The end of a long text: names of checkpoints differ there."""
    return text if len(text) <= most else "…" + text[1 - most :]


def cosine_text(value: float | None) -> str:
    """0.99834 -> "0.998"; "–" for None."""
    return NONE if value is None else f"{value:.3f}"


def cost_text(ratio: float | None) -> str:
    """A ratio near 1 with two decimals: 1.0312 -> "1.03x"; "–" for None."""
    return NONE if ratio is None else f"{ratio:.2f}x"


def millions(number: float | None) -> str:
    """5524416 -> "5.52 M"; small numbers in full; "–" for None."""
    if number is None or number < 1e6:
        return NONE if number is None else f"{number:,.0f}"
    return f"{figure(number / 1e6)} M"
