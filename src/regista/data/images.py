"""Images from files to batches: the door to ``reading`` and ``fit``, and the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from regista.data.fit import FittedImages, FitPolicy, fit_images
from regista.data.reading import (
    LoadedImages,
    UnreadableImage,
    find_images,
    load_image,
    load_images,
    none_left,
)

__all__ = [
    "FitPolicy",
    "FittedImages",
    "ImageStream",
    "LoadedImages",
    "UnreadableImage",
    "find_images",
    "fit_images",
    "load_image",
    "load_images",
]


class ImageStream:
    """Files as fitted batches, read ahead by threads; few images are in memory at a time.

    Args:
        paths: Image files.
        fit: PIL images to ``FittedImages``, e.g. ``Backbone.fit``.
        batch_size: Images a batch; unreadable files leave no gap.
        num_workers: Threads that read ahead; 0 reads in turn.

    Attributes:
        skipped: (path, reason) of unreadable files, complete after the iteration.

    Raises:
        ValueError: at the end, if not one image could be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fit: Callable[[list[Image.Image]], FittedImages],
        *,
        batch_size: int,
        num_workers: int = 0,
    ) -> None:
        self.paths = list(paths)
        self.fit = fit
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.skipped: list[tuple[Path, str]] = []

    def __iter__(self) -> Iterator[tuple[list[int], FittedImages]]:
        self.skipped = []
        indices: list[int] = []
        images: list[Image.Image] = []
        some = False
        for index, read in enumerate(self._read()):
            if isinstance(read, str):
                self.skipped.append((self.paths[index], read))
                continue
            indices.append(index)
            images.append(read)
            if len(images) == self.batch_size:
                yield indices, self.fit(images)
                indices, images, some = [], [], True
        if images:
            yield indices, self.fit(images)
        elif not some:
            raise ValueError(none_left(self.skipped))

    def _read(self) -> Iterator[Image.Image | str]:
        if not self.num_workers:
            yield from map(_read_one, self.paths)
            return
        ahead = 2 * self.batch_size
        waiting: deque[Future[Image.Image | str]] = deque()
        with ThreadPoolExecutor(self.num_workers) as pool:
            for path in self.paths:
                waiting.append(pool.submit(_read_one, path))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def _read_one(path: Path) -> Image.Image | str:
    try:
        return load_image(path)
    except UnreadableImage as error:
        return str(error)
