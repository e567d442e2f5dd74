"""Features of many images in one file: npz, parquet or safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.data.images import FitPolicy, FittedImages, ImageStream

KINDS = ("cls", "registers", "patches", "pooled")
SUFFIXES = (".npz", ".parquet", ".safetensors")


class FileBatches:
    """Preprocessed batches of image files, read ahead; knows what it read and what not.

    Attributes:
        names: Of the images that came.
    """

    def __init__(self, stream: ImageStream) -> None:
        self.stream = stream
        self.names: list[str] = []

    @property
    def note(self) -> str:
        """What preprocessing did; complete after the iteration."""
        return self.stream.note

    @property
    def skipped(self) -> list[tuple[Path, str]]:
        """Files that could not be read; complete after the iteration."""
        return self.stream.skipped

    def __iter__(self) -> Iterator[Tensor]:
        for indices, fitted in self.stream:
            self.names += [str(self.stream.paths[index]) for index in indices]
            yield fitted.pixels


def file_batches(
    backbone: Backbone,
    paths: Sequence[Path],
    *,
    image_size: tuple[int, int] | None = None,
    policy: FitPolicy = "resize",
    batch_size: int = 8,
    num_workers: int = 1,
) -> FileBatches:
    """Files as batches that ``extract_features`` takes."""

    def fit(images: Any) -> FittedImages:
        return backbone.fit(images, image_size=image_size, policy=policy)

    return FileBatches(ImageStream(paths, fit, batch_size=batch_size, num_workers=num_workers))


@torch.inference_mode()
def extract_features(
    backbone: Backbone,
    batches: Iterable[Tensor],
    *,
    kinds: Sequence[str] = KINDS,
    block: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Features of all images.

    Args:
        batches: Preprocessed pixels (b, 3, H, W), all of one size.
        kinds: Of "cls" (n, D), "registers" (n, R, D), "patches" (n, P, D) and "pooled" (n, D),
            the model's own image vector; "cls" and "registers" are left out where the model
            has none.
        block: Tokens after this block, before any norm, instead of the final normed ones.

    Returns:
        {kind: float32 array}.

    Raises:
        ValueError: for an unknown kind or block, or if no image came.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"unknown features {unknown}; choose from {KINDS}")
    if block is not None and not 0 <= block < backbone.depth:
        raise ValueError(f"block {block} does not exist; {backbone.name} has blocks 0 to {backbone.depth - 1}")
    site = f"blocks.{block}.resid"
    parts: dict[str, list[np.ndarray]] = {}
    done = 0
    for pixels in batches:
        features = backbone(pixels, capture=() if block is None else (site,))
        layout = features.layout
        tokens = features.tokens if block is None else features.captured[site]
        found = {
            "cls": layout.take(tokens, "cls").squeeze(-2) if layout.count("cls") else None,
            "registers": layout.take(tokens, "registers") if layout.num_register_tokens else None,
            "patches": layout.take(tokens, "patches"),
            "pooled": backbone.global_vector(tokens, layout) if block is None else None,
        }
        for kind in kinds:
            value = found[kind]
            if value is not None:
                parts.setdefault(kind, []).append(value.float().cpu().numpy())
        done += len(pixels)
        if progress is not None:
            progress(done)
    if not done:
        raise ValueError("no image to extract features from")
    return {kind: np.concatenate(values) for kind, values in parts.items()}


def check_output(path: Path, *, force: bool = False) -> None:
    """Raise ``ValueError`` before any work if ``write_features`` could not write there."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: features are written as {', '.join(SUFFIXES)}, got {suffix or 'no suffix'!r}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists; --force replaces it")


def write_features(path: Path, names: Sequence[str], features: dict[str, np.ndarray]) -> None:
    """Write features by the file's suffix, whole or not at all.

    npz and safetensors keep the arrays' shapes (safetensors holds the names in its metadata,
    npz as an array "names"); parquet has one row an image, "name" and one flat list a kind,
    with the shapes in the schema's metadata.

    Raises:
        ValueError: for another suffix, or when parquet's library is missing.
    """
    check_output(path, force=True)
    suffix = path.suffix.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if suffix == ".npz":
            with partial.open("wb") as file:
                np.savez(file, names=np.array(list(names)), **features)  # type: ignore[arg-type]
        elif suffix == ".safetensors":
            _write_safetensors(partial, names, features)
        else:
            _write_parquet(partial, names, features)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_safetensors(path: Path, names: Sequence[str], features: dict[str, np.ndarray]) -> None:
    import json

    from safetensors.numpy import save_file

    contiguous = {kind: np.ascontiguousarray(value) for kind, value in features.items()}
    save_file(contiguous, path, metadata={"names": json.dumps(list(names))})


def _write_parquet(path: Path, names: Sequence[str], features: dict[str, np.ndarray]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError("parquet needs pyarrow: pip install 'regista[parquet]'") from error
    columns = {"name": pa.array(list(names))}
    shapes = {}
    for kind, value in features.items():
        flat = pa.array(value.reshape(-1))
        columns[kind] = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(value.shape[1:])))
        shapes[f"shape.{kind}"] = "x".join(str(size) for size in value.shape[1:])
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(shapes), path)
