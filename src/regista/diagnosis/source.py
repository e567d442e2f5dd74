"""Images of a diagnosis, whatever form they come in, as preprocessed batches of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regista.backbones.base import Backbone
from regista.data.annotations import Targets
from regista.data.images import FittedImages, ImageStream, find_images
from regista.diagnosis.aggregation import boxes_to_cells, mask_to_cells
from regista.diagnosis.config import DiagnosisConfig

RAW = 50  # no normalisation in use brings a pixel this far from 0


class ImageSource:
    """Iterates over (pixels (b, 3, H, W), valid cells (b, rows, cols)).

    Args:
        images: A preprocessed float tensor (n, 3, H, W); or raw images that
            ``Backbone.preprocess`` takes: paths, folders, PIL images, arrays, uint8 tensors.
        targets: Boxes and masks in the pixels of the original files, for paths.
        names: For the record; file names or numbers by default.

    Attributes:
        capacity: The most images that can come.
        names: Of the images that came, in order.
        skipped: [(path, reason)] of those that could not be read.
        note: What preprocessing did.
        foreground: {row: bool (rows, cols)}, cells whose centre lies on an object.
    """

    def __init__(
        self,
        backbone: Backbone,
        images: Any,
        config: DiagnosisConfig,
        *,
        targets: Targets | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.backbone = backbone
        self.config = config
        self.targets = targets
        self.images, self.paths = _sorted_out(images)
        self.capacity = len(self.paths) if self.paths is not None else len(self.images)
        if names is not None and len(names) != self.capacity:
            raise ValueError(f"got {len(names)} names for {self.capacity} images")
        given = names or self.paths or range(self.capacity)
        self._all_names = [str(name) for name in given]
        self.names: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self.note = ""
        self.foreground: dict[int, np.ndarray] = {}
        if not self.capacity:
            raise ValueError("got no images")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices, fitted in self._fitted():
            if not self.note:
                self.note = fitted.note
            if self.targets is not None and self.paths is not None:
                self._read_targets(indices, fitted)
            self.names += [self._all_names[index] for index in indices]
            yield fitted.pixels, fitted.valid

    def _fit(self, batch: Any) -> FittedImages:
        size = None if self.config.image_size is None else (self.config.image_size[0], self.config.image_size[1])
        policy: Any = self.config.policy
        return self.backbone.fit(batch, image_size=size, policy=policy)

    def _fitted(self) -> Iterator[tuple[list[int], FittedImages]]:
        step = self.config.batch_size
        if self.paths is not None:
            stream = ImageStream(self.paths, self._fit, batch_size=step, num_workers=self.config.num_workers)
            for indices, fitted in stream:
                yield list(indices), fitted
            self.skipped = [(str(path), reason) for path, reason in stream.skipped]
            self.note = stream.note
            return
        for start in range(0, self.capacity, step):
            batch = self.images[start : start + step]
            indices = list(range(start, start + len(batch)))
            yield indices, _as_fitted(batch, self.backbone) if _is_preprocessed(batch) else self._fit(batch)

    def _read_targets(self, indices: list[int], fitted: FittedImages) -> None:
        if self.targets is None or self.paths is None:
            return
        layout = self.backbone.layout((fitted.pixels.shape[-2], fitted.pixels.shape[-1]))
        for position, index in enumerate(indices):
            boxes = self.targets.boxes_of(self.paths[index])
            mask = self.targets.mask_of(self.paths[index])
            if mask is not None:
                cells = mask_to_cells(fitted.mask_to_fitted(position, mask), layout.patch_size)
            elif boxes:
                inside = fitted.boxes_to_fitted(position, boxes)
                cells = boxes_to_cells(inside, layout.grid_size, layout.patch_size)
            else:
                continue
            self.foreground[len(self.names) + position] = cells


def _is_preprocessed(images: Any) -> bool:
    return isinstance(images, Tensor) and images.is_floating_point()


def _as_fitted(pixels: Tensor, backbone: Backbone) -> FittedImages:
    grid = backbone.layout((pixels.shape[-2], pixels.shape[-1])).grid_size
    valid = torch.ones(len(pixels), *grid, dtype=torch.bool)
    return FittedImages(pixels=pixels, valid=valid, note="")


def _sorted_out(images: Any) -> tuple[Any, list[Path] | None]:
    if isinstance(images, Tensor):
        if images.ndim != 4:
            raise ValueError(f"a tensor of images is (n, 3, H, W), got {tuple(images.shape)}")
        if images.shape[1] != 3:
            raise ValueError(f"a tensor of images is (n, 3, H, W), channels before rows, got {tuple(images.shape)}")
        if images.is_floating_point() and len(images) and images.abs().amax() > RAW:
            raise ValueError(
                f"float tensors are taken as preprocessed, these go up to {images.abs().amax():.0f}: raw "
                "pixels of 0 to 255? Give uint8, or call backbone.preprocess on floats in [0, 1]"
            )
        return images, None
    if isinstance(images, (str, Path)):
        images = [images]
    if isinstance(images, (Image.Image, np.ndarray)):
        images = [images]
    if not isinstance(images, Iterable):
        raise ValueError(f"images are paths, PIL images, arrays or a tensor, got {type(images).__name__}")
    images = list(images)
    if images and all(isinstance(image, (str, Path)) for image in images):
        return None, find_images(images)
    return images, None
