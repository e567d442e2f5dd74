"""Images from files to batches: the door to reading and fitting, and the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from regista.data.fit import FitPolicy, fit_images
from regista.data.placement import FittedImages, Placement, describe
from regista.data.reading import (
    LoadedImages,
    UnreadableImage,
    files_digest,
    find_images,
    load_image,
    load_images,
    none_left,
    unique_files,
)
from regista.data.skipping import skipped_files, tell_skipped

__all__ = [
    "FitPolicy",
    "FittedImages",
    "ImageStream",
    "LoadedImages",
    "Placement",
    "UnreadableImage",
    "files_digest",
    "find_images",
    "fit_images",
    "load_image",
    "load_images",
    "skipped_files",
    "unique_files",
]


class ImageStream:
    """Image files as fitted batches; whatever their number, few are in memory at a time.

    Iterating gives (indices, FittedImages): which of ``paths`` are in the batch, in order.
    Batches are full but for the last one, also where files in between cannot be read. Every
    iteration reads the files anew.

    Args:
        paths: Image files.
        fit: List of RGB PIL images -> ``FittedImages``, e.g. ``Backbone.fit``; called with one
            image at a time, in the threads.
        batch_size: Images a batch.
        num_workers: Threads that read and fit ahead; 0 does it in turn.

    Attributes:
        skipped: (path, reason) of unreadable files; complete after the iteration.
        placements: Of the images that came so far.

    Raises:
        ValueError: at the end of the iteration, if not one image could be read; and what
            ``fit`` raises.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        fit: Callable[[list[Image.Image]], FittedImages],
        *,
        batch_size: int,
        num_workers: int = 0,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size is at least 1 and num_workers 0, got {batch_size} and {num_workers}")
        self.paths = [Path(path) for path in paths]
        self.fit = fit
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.skipped: list[tuple[Path, str]] = []
        self.placements: list[Placement] = []

    @property
    def note(self) -> str:
        """What fitting did to the images that came so far, in words."""
        return describe(self.placements)

    def __iter__(self) -> Iterator[tuple[list[int], FittedImages]]:
        self.skipped, self.placements = [], []
        indices: list[int] = []
        parts: list[FittedImages] = []
        for index, fitted in enumerate(self._fitted()):
            if isinstance(fitted, str):
                self.skipped.append((self.paths[index], fitted))
                tell_skipped(self.paths[index], fitted)
                continue
            self.placements += fitted.placements
            indices.append(index)
            parts.append(fitted)
            if len(parts) == self.batch_size:
                yield indices, FittedImages.cat(parts)
                indices, parts = [], []
        if parts:
            yield indices, FittedImages.cat(parts)
        if len(self.skipped) == len(self.paths):
            raise ValueError(none_left(self.skipped))

    def _fitted(self) -> Iterator[FittedImages | str]:
        """Each file, in order: fitted, or the reason why it cannot be read."""
        if not self.num_workers:
            yield from map(self._fit_one, self.paths)
            return
        waiting: deque[Future[FittedImages | str]] = deque()
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="regista-images")
        try:
            for path in self.paths:
                waiting.append(pool.submit(self._fit_one, path))
                if len(waiting) > self.batch_size + self.num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fit_one(self, path: Path) -> FittedImages | str:
        try:
            image = load_image(path)
        except UnreadableImage as error:
            return error.reason
        return self.fit([image])
