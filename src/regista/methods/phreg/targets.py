"""Denoised features of many images on disk, as targets for a student.

The released code denoises anew in every epoch, which is four fifths of its work. Stored targets
are computed once, at the price of fixed views for each image.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regista.methods.phreg.map_images import ImageEntry
from regista.methods.phreg.target_settings import DTYPES, INDEX, TargetIndex, TargetSettings
from regista.results.writing import PARTIAL, in_words, write_whole

_OVERHEAD = 1024  # bytes an image: names, checksum, its entry in the index
_MARGIN = 1.02


class TargetStore:
    """A folder of targets: ``index.json`` says of what, ``shard-*.safetensors`` hold them.

    What has been computed is read from the shards, which are whole or not there at all, so a
    process may be killed at any time; what it had not flushed is missing and nothing else. One
    process may write at a time, any number may read. A shard keeps a checksum of each target.

    Attributes:
        folder, settings: As given.
        images: One entry for each image of the list, in its order.
    """

    def __init__(self, folder: Path, settings: TargetSettings, images: Sequence[ImageEntry], shard_size: int) -> None:
        self.folder = folder
        self.settings = settings
        self.images = list(images)
        self.shard_size = shard_size
        self._where = _scan(folder)
        self._waiting: dict[int, Tensor] = {}
        self._index_changed = False

    @classmethod
    def create(
        cls, folder: str | Path, settings: TargetSettings, images: Sequence[ImageEntry], *, shard_size: int = 32
    ) -> TargetStore:
        """Begin a store in a new folder.

        Args:
            shard_size: Targets a file, and the most that a kill can cost.

        Raises:
            ValueError: if the folder has targets already, or cannot be written.
        """
        folder = Path(folder)
        if shard_size < 1:
            raise ValueError(f"shard_size is at least 1, got {shard_size}")
        if (folder / INDEX).exists() or _shards(folder):
            raise ValueError(f"{folder} has targets already; resume there, or take another folder")
        store = cls(folder, settings, images, shard_size)
        store._index().write(folder)
        return store

    @classmethod
    def open(cls, folder: str | Path) -> TargetStore:
        """Open a store, finished or not.

        Raises:
            ValueError: if there is none, or its index or a shard is damaged (naming the file).
        """
        index = TargetIndex.read(Path(folder))
        return cls(Path(folder), index.settings, index.images, index.shard_size)

    def check(self, settings: TargetSettings, images: Sequence[ImageEntry]) -> None:
        """Raise ``ValueError`` with both values if these are not the settings and images of the store."""
        self._index().check(settings, images, self.folder)

    def __len__(self) -> int:
        """Targets there are."""
        return len(self.indices())

    def indices(self) -> list[int]:
        """Images that have a target, in order."""
        return sorted({*self._where, *self._waiting})

    def missing(self) -> list[int]:
        """Images that want a target still: those without one, but for the unreadable."""
        there = {*self._where, *self._waiting}
        return [index for index, entry in enumerate(self.images) if index not in there and not entry.reason]

    @property
    def skipped(self) -> list[tuple[Path, str]]:
        """(path, reason) of the images that have no target because they cannot be read."""
        return [(Path(entry.path), entry.reason) for entry in self.images if entry.reason]

    def grid_size(self, index: int) -> tuple[int, int]:
        """(rows, cols) of an image's map."""
        size = self._entry(index).map_size
        if size is None:
            raise ValueError(f"image {index} ({self.images[index].path}) has no map: {self.images[index].reason}")
        return self.settings.geometry.grid_size(size)

    def write(self, index: int, features: Tensor) -> None:
        """Keep a target; it is on disk when its shard is full, or after ``flush``.

        Args:
            index: Of the image in the list.
            features: (P, D).

        Raises:
            ValueError: for another shape, NaN or infinite values, values beyond float16 (nothing
                is scaled or clipped; dtype "float32" holds them), or a file that cannot be written.
        """
        rows, cols = self.grid_size(index)
        path = self.images[index].path
        if tuple(features.shape) != (rows * cols, self.settings.embed_dim):
            raise ValueError(
                f"{path}: a target of {(rows * cols, self.settings.embed_dim)} (P, D) is wanted for a map of {rows} "
                f"rows x {cols} cols, got {tuple(features.shape)}"
            )
        dtype = DTYPES[self.settings.dtype]
        largest = float(features.abs().max())
        if not largest <= torch.finfo(dtype).max:
            advice = "" if dtype == torch.float32 else "; store targets as dtype='float32'"
            raise ValueError(f"{path}: a feature of size {largest:.6g} does not fit {self.settings.dtype}{advice}")
        self._waiting[index] = features.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        if len(self._waiting) >= self.shard_size:
            self.flush()

    def skip(self, index: int, reason: str) -> None:
        """Note that an image cannot be read; on disk after ``flush``."""
        self.images[index] = replace(self._entry(index), reason=reason)
        self._index_changed = True

    def flush(self) -> None:
        """Bring to disk what waits for its shard to fill."""
        if self._waiting:
            path = self.folder / f"shard-{self._next_number():06d}.safetensors"
            tensors = {str(index): features for index, features in self._waiting.items()}
            sums = json.dumps({key: _checksum(value) for key, value in tensors.items()})
            write_whole(path, lambda partial: save_file(tensors, partial, metadata={"crc32": sums}))
            self._where |= dict.fromkeys(self._waiting, path)
            self._waiting = {}
        if self._index_changed:
            self._index().write(self.folder)
            self._index_changed = False

    def read(self, index: int) -> Tensor:
        """The target of an image: (P, D) float32.

        Raises:
            ValueError: if it has none, or its shard is damaged (naming the file).
        """
        rows, cols = self.grid_size(index)
        if index in self._waiting:
            return self._waiting[index].float()
        if index not in self._where:
            raise ValueError(f"image {index} ({self.images[index].path}) has no target in {self.folder} yet")
        path = self._where[index]
        try:
            with safe_open(path, "pt") as shard:
                found: Tensor = shard.get_tensor(str(index))
                wanted = json.loads(shard.metadata()["crc32"])[str(index)]
        except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(_damaged(path, in_words(error))) from error
        if _checksum(found) != wanted or tuple(found.shape) != (rows * cols, self.settings.embed_dim):
            raise ValueError(_damaged(path, f"the target of image {index} is not what was written"))
        return found.float()

    def clear_partial(self) -> None:
        """Remove what a killed writer left; only for the process that writes."""
        for path in self.folder.glob(f".*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def _entry(self, index: int) -> ImageEntry:
        if not 0 <= index < len(self.images):
            raise ValueError(f"image {index} does not exist; {self.folder} has 0 to {len(self.images) - 1}")
        return self.images[index]

    def _next_number(self) -> int:
        return max((int(path.stem.rpartition("-")[2]) + 1 for path in _shards(self.folder)), default=0)

    def _index(self) -> TargetIndex:
        return TargetIndex(self.settings, tuple(self.images), self.shard_size)


def disk_cost(num_images: int, grid_size: tuple[int, int], dim: int, dtype: str = "float16") -> int:
    """Bytes that targets take on disk, names and checksums included.

    Args:
        num_images: With maps of this size.
        grid_size: (rows, cols) of the map; of a photo of 4:3 some 4/3 of the square one.
        dim: D.
    """
    return num_images * (grid_size[0] * grid_size[1] * dim * DTYPES[dtype].itemsize + _OVERHEAD)


def check_space(folder: str | Path, needed: int) -> None:
    """Raise ``ValueError`` if a folder, there or not yet, has no room for so many bytes and 2 % more."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed * _MARGIN > free:
        raise ValueError(
            f"the targets need {readable_size(int(needed * _MARGIN))}, {readable_size(free)} are free in {place}; "
            "take another folder, fewer images or a smaller image_size"
        )


def readable_size(size: int) -> str:
    """Bytes in MiB or GiB, to three digits."""
    return f"{size / 2**20:.3g} MiB" if size < 2**30 else f"{size / 2**30:.3g} GiB"


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def _scan(folder: Path) -> dict[int, Path]:
    """{image: its shard}, from the headers."""
    found: dict[int, Path] = {}
    for path in _shards(folder):
        try:
            with safe_open(path, "pt") as shard:
                found |= {int(key): path for key in shard.keys()}  # noqa: SIM118  it is no mapping
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(_damaged(path, in_words(error))) from error
    return found


def _damaged(path: Path, why: str) -> str:
    return f"{path} is damaged ({why}); delete it and resume, which computes its images anew"


def _checksum(target: Tensor) -> int:
    return zlib.crc32(target.numpy().tobytes())
