"""Shifted and flipped views of an image, and the way back from their features to its patch grid.

A view is an offset (dy, dx) in whole patches and a horizontal flip, applied in this order. A
positive ``dy`` moves the content up, a positive ``dx`` to the left: cell (y, x) of the unflipped
view shows cell (y + dy, x + dx) of the image. What lies outside is filled.

Source: PH-Reg (arXiv 2505.21501), test-time augmentation of the teacher, and its released code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CANDIDATES_PER_VIEW = 10


def sample_views(
    grid_size: tuple[int, int],
    num_views: int = 10,
    shift_ratio: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Offsets that are spread widely, and random flips; view 0 is the image itself.

    As in the released code: of ``10 * num_views`` candidates, uniform on the inclusive range and
    drawn with replacement, farthest point sampling (squared Euclidean distance in patches, from a
    random candidate on) takes ``num_views``; then the first of them, where the sampling began, is
    overwritten by (0, 0). So the others are spread around a point that is no longer used, and
    (0, 0) may come again among them. They are distinct as long as the candidates have enough
    distinct values. The released code draws from Python's, numpy's and torch's global
    generators, so its draws cannot be repeated here; and it knows square grids only, where here
    rows and columns have a range each.

    Args:
        grid_size: (rows, cols) of the patch grid.
        num_views: V, the identity included.
        shift_ratio: Largest shift as a share of the rows or columns, in [0, 1); the range is
            ``round(shift_ratio * cells)`` with halves to even (6 for 37 cells at 0.15), at most
            ``cells - 1``, so that every view sees a part of the image.
        generator: Makes the draws reproducible. None takes a new one with a seed from the
            system. The global state of torch is neither read nor changed.

    Returns:
        Offsets (V, 2) int64, rows (dy, dx), and flips (V,) bool, both on the CPU.

    Raises:
        ValueError: for an empty grid, ``num_views`` below 1 or a ratio outside [0, 1).
    """
    rows, cols = grid_size
    if min(rows, cols) < 1:
        raise ValueError(f"grid_size is (rows, cols), both at least 1, got {tuple(grid_size)}")
    if isinstance(num_views, bool) or not isinstance(num_views, int) or num_views < 1:
        raise ValueError(f"num_views is a whole number of at least 1 (view 0 is the image itself), got {num_views!r}")
    if not 0 <= shift_ratio < 1:
        raise ValueError(f"shift_ratio is a share of the grid in [0, 1), for example 0.15, got {shift_ratio!r}")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    device = generator.device
    drawn = []
    for cells in (rows, cols):
        reach = min(round(shift_ratio * cells), cells - 1)
        shape = (CANDIDATES_PER_VIEW * num_views,)
        drawn.append(torch.randint(-reach, reach + 1, shape, generator=generator, device=device).cpu())
    start = int(torch.randint(len(drawn[0]), (1,), generator=generator, device=device))
    flips = torch.randint(2, (num_views,), generator=generator, device=device).cpu().bool()
    candidates = torch.stack(drawn, 1)  # (10 V, 2)
    offsets = candidates[farthest_points(candidates, num_views, start)]
    offsets[0] = 0
    flips[0] = False
    return offsets, flips


def farthest_points(points: Tensor, count: int, start: int) -> Tensor:
    """Greedy farthest point sampling: each next point has the largest distance to those chosen.

    Args:
        points: (n, d) integers or floats.
        count: How many to choose, the first included; a point comes again once none has a distance.
        start: Index of the first.

    Returns:
        (count,) indices; of equal distances the first in the list wins.
    """
    chosen = [start]
    nearest = torch.full((len(points),), float("inf"), dtype=torch.float64)
    for _ in range(count - 1):
        distance = (points - points[chosen[-1]]).square().sum(1).double()
        nearest = torch.minimum(nearest, distance)
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen)


def view_of(images: Tensor, offset: tuple[int, int], flip: bool, patch_size: int, fill: Sequence[float]) -> Tensor:
    """One view of a batch: shifted, filled, then flipped.

    Args:
        images: (B, C, H, W), height and width divisible by the patch size.
        offset: (dy, dx) in patches: row y shows row ``y + dy * patch_size`` of the image.
        flip: Mirror left and right after the shift.
        patch_size: Pixels.
        fill: C values for what lies outside the image, for white ``(1 - mean) / std``.

    Returns:
        (B, C, H, W), a copy unless nothing is shifted or flipped.
    """
    if not flip and not any(offset):
        return images
    batch, channels, height, width = images.shape
    canvas = images.new_tensor(fill).view(1, channels, 1, 1).repeat(batch, 1, height, width)
    (rows, view_rows), (cols, view_cols) = _overlap(height // patch_size, width // patch_size, offset, flip)
    seen = images[..., _pixels(rows, patch_size), _pixels(cols, patch_size)]
    canvas[..., _pixels(view_rows, patch_size), _pixels(view_cols, patch_size)] = seen.flip(-1) if flip else seen
    return canvas


def accumulate(total: Tensor, features: Tensor, offset: tuple[int, int], flip: bool, weight: int = 1) -> None:
    """Add the features of one view, mapped back to the image's cells, to a sum over views; in place.

    Args:
        total: (B, rows, cols, D) float32 or wider; cells that the view does not see are untouched.
        features: (B, P, D) of the view, row by row, P = rows * cols.
        offset, flip: The view, as in ``view_of``.
        weight: How many times the view counts.

    Raises:
        ValueError: if the features do not fit the sum.
    """
    batch, height, width, dim = total.shape
    if features.shape != (batch, height * width, dim):
        raise ValueError(f"features of {(batch, height * width, dim)} (B, P, D) wanted, got {tuple(features.shape)}")
    (rows, view_rows), (cols, view_cols) = _overlap(height, width, offset, flip)
    seen = torch.unflatten(features, 1, (height, width))[:, view_rows, view_cols]  # (B, rows seen, cols seen, D)
    total[:, rows, cols].add_(seen.flip(2) if flip else seen, alpha=weight)


def coverage(grid_size: tuple[int, int], offsets: Tensor) -> Tensor:
    """How many views see each cell: K(r, c) = sum_i [0 <= r - dy_i < rows][0 <= c - dx_i < cols].

    Args:
        grid_size: (rows, cols).
        offsets: (V, 2) int64 in patches; a view that comes twice counts twice. Flips do not matter.

    Returns:
        (rows, cols) int64.
    """
    inside = []
    for cells, shifts in zip(grid_size, offsets.cpu().unbind(1), strict=True):
        position = torch.arange(cells) - shifts.unsqueeze(1)  # (V, cells)
        inside.append(((position >= 0) & (position < cells)).long())
    return torch.einsum("vr,vc->rc", *inside)


def _overlap(
    rows: int, cols: int, offset: tuple[int, int], flip: bool
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Along rows and along columns: the cells of the image that a view sees, and where the view has them."""
    places = []
    for cells, shift in ((rows, offset[0]), (cols, offset[1])):
        seen = slice(max(0, shift), max(0, min(cells, cells + shift)))
        places.append((seen, slice(seen.start - shift, max(seen.start, seen.stop) - shift)))
    (along_rows, (seen, view)) = places
    return along_rows, (seen, slice(cols - view.stop, cols - view.start) if flip else view)


def _pixels(cells: slice, patch_size: int) -> slice:
    return slice(cells.start * patch_size, cells.stop * patch_size)
