"""Crops of images together with the same crops of their stored targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regista.data.images import load_image
from regista.methods.phreg.map_images import hash_file
from regista.methods.phreg.targets import TargetStore
from regista.train.sampling import SeededDataset


@dataclass(frozen=True)
class Crop:
    """A square of a map, in whole patches.

    Attributes:
        row, col: Of its first cell.
        flip: Mirrored left and right after cutting.
    """

    row: int
    col: int
    flip: bool


class CropDataset(SeededDataset):
    """Random R x R crops along the long side, as the student sees them, and their targets.

    The released code places crops to the pixel; here they lie on the map's cells, so that image
    and target match exactly. What an item is depends on (seed, epoch, image) alone, whatever the
    order, the workers or the number of images read before.

    Args:
        store: Targets, or their folder.
        indices: Of the images to take; all that have a target by default.
        central: The middle crop, the same in every epoch, unmirrored: for held-out images.
        flip: Mirror half of the crops, image and target alike. The released student sees no flips.
        allow_partial: Take what targets there are.

    Raises:
        ValueError: if there is no target at all, or not all of them without ``allow_partial``.
    """

    def __init__(
        self,
        store: TargetStore | str | Path,
        *,
        indices: Sequence[int] | None = None,
        central: bool = False,
        flip: bool = False,
        allow_partial: bool = False,
    ) -> None:
        self.store = store if isinstance(store, TargetStore) else TargetStore.open(store)
        missing = len(self.store.missing())
        self.indices = self.store.indices()
        if not self.indices or (missing and not allow_partial):
            raise ValueError(
                f"{self.store.folder} has {len(self.indices)} targets, {missing} are missing; "
                "finish them with compute_targets(..., resume=True)"
            )
        if indices is not None:
            there = set(self.indices)
            self.indices = [index for index in indices if index in there]
        if not self.indices:
            raise ValueError(f"{self.store.folder} has no target of the images asked for")
        self.central = central
        self.flip = flip

    def __len__(self) -> int:
        """Images that have a target."""
        return len(self.indices)

    def crop(self, item: int, *, epoch: int = 0, seed: int = 0) -> Crop:
        """Where the crop of an item lies in an epoch."""
        index = self.indices[item]
        rows, cols = self.store.grid_size(index)
        cells = self._side // self.store.settings.geometry.patch_size
        if self.central:
            return Crop((rows - cells) // 2, (cols - cells) // 2, False)
        rng = np.random.default_rng((seed, epoch, index))
        row, col = (int(rng.integers(length - cells + 1)) for length in (rows, cols))
        return Crop(row, col, bool(rng.integers(2)) and self.flip)

    def item(self, index: int, *, epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """The image (3, R, R), normalised, and its target (P, D) float32, row by row.

        Raises:
            ValueError: if the file is not the one that the target is of, or a shard is damaged.
        """
        crop, index = self.crop(index, epoch=epoch, seed=seed), self.indices[index]
        geometry = self.store.settings.geometry
        patch, cells = geometry.patch_size, self._side // geometry.patch_size
        pixels = self._pixels(index)
        pixels = pixels.narrow(1, crop.row * patch, self._side).narrow(2, crop.col * patch, self._side)
        target = torch.unflatten(self.store.read(index), 0, self.store.grid_size(index))  # (rows, cols, D)
        target = target.narrow(0, crop.row, cells).narrow(1, crop.col, cells)
        if crop.flip:
            pixels, target = pixels.flip(2), target.flip(1)
        return pixels.contiguous(), target.flatten(0, 1).contiguous()  # (P, D)

    @property
    def _side(self) -> int:
        return self.store.settings.geometry.image_size

    def _pixels(self, index: int) -> Tensor:
        """The whole map of an image: (3, H, W)."""
        entry = self.store.images[index]
        path = Path(entry.path)
        image = load_image(path)
        if hash_file(path) != (entry.sha256, entry.bytes):
            raise ValueError(
                f"{path} has changed since its target was made; compute the targets anew in another folder"
            )
        return self.store.settings.geometry.fit([image]).pixels.squeeze(0)
