"""Computing the targets of a list of images, in as many goes as it takes.

The released code crops R x R first and denoises the crop, anew in every epoch. Here the whole image
is denoised once: its short side becomes R, the long side keeps the aspect, and a crop sees the map
of its cells. The teacher's position table is resized to the rectangle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.weights import weights_hash
from regista.data.images import ImageStream, find_images
from regista.data.reading import none_left
from regista.layers.shifted_views import sample_views
from regista.methods.phreg.denoising import ReadOut, denoise, normed_patches
from regista.methods.phreg.map_images import ImageEntry, MapGeometry, describe_images
from regista.methods.phreg.target_settings import INDEX, TargetSettings
from regista.methods.phreg.targets import TargetStore, check_space, disk_cost, readable_size

LOGGER = logging.getLogger(__name__)


def compute_targets(
    backbone: Backbone,
    paths: str | Path | Sequence[str | Path],
    folder: str | Path,
    *,
    num_views: int = 10,
    shift_ratio: float = 0.15,
    seed: int = 0,
    batch_size: int = 10,
    image_size: int | None = None,
    max_aspect: float = 2.0,
    dtype: str = "float16",
    features: ReadOut | None = None,
    readout: str = "patches",
    resume: bool = False,
    shard_size: int = 32,
    num_workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> TargetStore:
    """Denoise whole images and store their maps, from which ``CropDataset`` cuts crops; logs the disk cost first.

    Args:
        backbone: The teacher.
        paths: Files, folders and patterns, see ``regista.data.images.find_images``; the order counts.
        folder: New, or with targets of the same images and settings if ``resume``.
        num_views, shift_ratio: See ``sample_views``; drawn for each image from (seed, its index).
        batch_size: Views of an image in one forward pass; does not change the targets.
        image_size: R in pixels; the backbone's own by default.
        max_aspect: Longest long side, in R.
        dtype: "float16" or "float32" on disk.
        features, readout: Another read-out as in ``denoise``, and a name for it.
        resume: Go on with what is there.
        shard_size: Targets a file; so many images at most are lost to a kill.
        num_workers: Threads that read ahead.
        progress: Gets the number of images done, skipped ones included.

    Returns:
        The store; unreadable images are in its ``skipped``.

    Raises:
        ValueError: if no image can be read, the disk has not the room (before anything is
            computed), or the folder has targets and ``resume`` is False or they are of another
            model, settings or images.
    """
    folder = Path(folder)
    if batch_size < 1 or shard_size < 1:
        raise ValueError(f"batch_size and shard_size are at least 1, got {batch_size} and {shard_size}")
    if not resume and (folder / INDEX).exists():
        raise ValueError(f"{folder} has targets already; resume=True goes on with them, or take another folder")
    views = (num_views, float(shift_ratio), seed)
    settings = _settings(backbone, image_size, float(max_aspect), views, dtype, features, readout)
    store = _opened(folder, settings, describe_images(find_images(paths), settings.geometry), shard_size)
    try:
        _fill(store, backbone, features, batch_size, num_workers, progress or (lambda done: None))
    finally:
        store.flush()
    if not len(store):
        raise ValueError(none_left(store.skipped))
    return store


def image_views(
    seed: int, index: int, grid_size: tuple[int, int], num_views: int, shift_ratio: float
) -> tuple[Tensor, Tensor]:
    """The views of one image of a list, the same whatever is computed before or beside it.

    Raises:
        ValueError: for a negative seed, and as ``sample_views``.
    """
    if seed < 0:
        raise ValueError(f"seed is at least 0, got {seed}")
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, index)).generate_state(1).item()))
    return sample_views(grid_size, num_views, shift_ratio, generator)


def _fill(
    store: TargetStore,
    backbone: Backbone,
    features: ReadOut | None,
    batch_size: int,
    num_workers: int,
    progress: Callable[[int], None],
) -> None:
    """Compute what is missing, in the order of the list."""
    settings, pending = store.settings, store.missing()
    files = [store.images[index].path for index in pending]
    stream = ImageStream(files, settings.geometry.fit, batch_size=1, num_workers=num_workers)
    before = len(store.images) - len(pending)
    try:
        for (position,), fitted in stream if pending else ():
            index = pending[position]
            rows, cols = store.grid_size(index)
            if tuple(fitted.pixels.shape[-2:]) != store.images[index].map_size:
                store.skip(index, "its header gives another size than its pixels")
                continue
            views = image_views(settings.seed, index, (rows, cols), settings.num_views, settings.shift_ratio)
            found = denoise(backbone, fitted.pixels, views=views, features=features, views_per_forward=batch_size)
            store.write(index, found.squeeze(0))
            progress(before + position + 1)
    except ValueError:
        if len(stream.skipped) < len(pending):  # otherwise the stream says that it could read none of these
            raise
    finally:
        reasons = {str(path): reason for path, reason in stream.skipped}
        for index, file in zip(pending, files, strict=True):
            if file in reasons:
                store.skip(index, reasons[file])
    progress(len(store.images))


def _settings(
    backbone: Backbone,
    image_size: int | None,
    max_aspect: float,
    views: tuple[int, float, int],
    dtype: str,
    features: ReadOut | None,
    readout: str,
) -> TargetSettings:
    """What the targets depend on; a mistake shows before any image is read."""
    if features is not None and readout == "patches":
        raise ValueError("give the read-out a name of its own: readout='...'; it tells its targets from others")
    num_views, shift_ratio, seed = views
    image_views(seed, 0, (1, 1), num_views, shift_ratio)
    side = _square_side(backbone, image_size)
    geometry = MapGeometry(side, backbone.patch_size, max_aspect, backbone.mean, backbone.std)
    return TargetSettings(
        model=backbone.name,
        weights=weights_hash(backbone.module),
        readout=readout,
        embed_dim=_dimension(backbone, features or normed_patches, geometry),
        geometry=geometry,
        num_views=num_views,
        shift_ratio=shift_ratio,
        seed=seed,
        dtype=dtype,
    )


def _opened(folder: Path, settings: TargetSettings, images: list[ImageEntry], shard_size: int) -> TargetStore:
    """A store of these settings and images, old or new, with room for what it lacks."""
    if all(entry.map_size is None for entry in images):
        raise ValueError(none_left([(Path(entry.path), entry.reason) for entry in images]))
    store = None
    if (folder / INDEX).exists():
        store = TargetStore.open(folder)
        store.check(settings, images)
        store.clear_partial()
    lacking = images if store is None else [images[index] for index in store.missing()]
    needed = sum(_cost(settings, entry.map_size) for entry in lacking if entry.map_size is not None)
    check_space(folder, needed)
    if needed:
        LOGGER.info("denoised targets of %d images: %s on the disk, in %s", len(lacking), readable_size(needed), folder)
    if store is None:
        return TargetStore.create(folder, settings, images, shard_size=shard_size)
    return store


def _cost(settings: TargetSettings, map_size: tuple[int, int]) -> int:
    return disk_cost(1, settings.geometry.grid_size(map_size), settings.embed_dim, settings.dtype)


def _square_side(backbone: Backbone, image_size: int | None) -> int:
    if image_size is not None:
        return image_size
    height, width = backbone.image_size
    if height != width:
        raise ValueError(f"{backbone.name} takes {height}x{width} pixels; say image_size, the side of square crops")
    return height


@torch.no_grad()
def _dimension(backbone: Backbone, readout: ReadOut, geometry: MapGeometry) -> int:
    """D, from a blank image."""
    side = geometry.image_size
    return int(readout(backbone, torch.zeros(1, 3, side, side)).shape[-1])
