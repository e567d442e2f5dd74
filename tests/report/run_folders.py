"""Run folders as a diagnosis leaves them, made of random smooth maps: no model, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from regista.results import RunFolder

BINS = 40


@dataclass
class FakeModel:
    """A model to be written into a run folder.

    Attributes:
        outliers: How many times the median their norms are; None for a clean model.
        onset: The first block that has them.
        images, grid, depth, registers, names: As they say.
        planted: Say that they were planted.
        changes: Keys of the entry to replace; of "measures", keys of measures.
        without: Arrays to leave out.
        photos: (k, h, w, 3) bytes, random ones if None.
    """

    name: str = "tiny"
    outliers: float | None = None
    onset: int = 2
    images: int = 3
    grid: tuple[int, int] = (9, 12)
    depth: int = 6
    registers: int = 0
    planted: bool = False
    share: float = 0.03
    seed: int = 0
    names: Sequence[str] | None = None
    photos: np.ndarray | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()


def make_run(path: Path, *models: FakeModel, kind: str = "diagnosis", **changes: Any) -> Path:
    """Write a run folder; ``changes`` are values of its record."""
    run = RunFolder.create(path, kind=kind)
    entries = []
    for index, model in enumerate(models):
        entry, arrays = contents(model)
        run.write_arrays(
            f"arrays/{index:02d}", {key: value for key, value in arrays.items() if key not in model.without}
        )
        entries.append({**entry, "arrays": f"arrays/{index:02d}", **_entry_changes(entry, model.changes)})
    run.update(models=entries, config={"batch_size": 8, "cutoff": None}, **changes)
    return run.path


def contents(model: FakeModel) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Entry and arrays of a model: every number in the entry is that of the arrays."""
    draw = np.random.default_rng(model.seed)
    norms, masks = _norms(model, draw)  # (n, blocks, rows, cols), (n, rows, cols)
    sick = model.outliers is not None
    block = model.depth - 1
    last = norms[:, block]
    cutoff = float(np.sqrt(last[masks].min() * last[~masks].max())) if sick else None
    names = list(model.names or (f"photos/image-{index}.jpg" for index in range(model.images)))
    high = _high_norm(model, norms, masks, cutoff)
    share = high["share"][-1]
    entry = {
        "schema": 1,
        "model": model.name,
        "library": "timm",
        "verdict": "artifacts" if sick else "clean",
        "kinds": ["high-norm"] if sick else [],
        "summary": [
            f"{share:.1%} of the patch tokens have outlier norms." if sick else "No outlier norms in any block."
        ],
        "planted": {
            "block": model.onset,
            "neurons": [7, 9],
            "kind": "content",
            "share": 0.03,
            "precision": 1.0,
            "recall": 0.98,
        }
        if model.planted
        else None,
        "images": {"count": model.images, "names": names, "size": _size(model), "skipped": [], "note": "centre crop"},
        "grid_size": list(model.grid),
        "patch_size": 14,
        "depth": model.depth,
        "num_register_tokens": model.registers,
        "has_cls": True,
        "attention_backend": "fused",
        "attention_queries": ["CLS", *(f"register {index}" for index in range(model.registers))],
        "onset_block": model.onset if sick else None,
        "outlier_block": block if sick else None,
        "cutoff": cutoff,
        "share": share,
        "fixed_place": "moving" if sick else None,
        "outlier_positions": [np.argwhere(mask).tolist() for mask in masks],
        "measures": {"high_norm": high, **_measures(model)},
    }
    return entry, _arrays(model, draw, norms, masks)


def _high_norm(model: FakeModel, norms: np.ndarray, masks: np.ndarray, cutoff: float | None) -> dict[str, Any]:
    flat = norms.transpose(1, 0, 2, 3).reshape(model.depth, -1)
    last = norms[:, model.depth - 1]
    late = np.arange(model.depth) >= model.onset
    sick = cutoff is not None
    return {
        "median": np.median(flat, 1).tolist(),
        "p99": np.quantile(flat, 0.99, 1).tolist(),
        "max": flat.max(1).tolist(),
        "share": (masks.mean() * late).tolist(),
        "cutoff": [cutoff if there else None for there in late],
        "ratio": float(np.median(last[masks]) / np.median(last[~masks])) if sick else None,
        "neighbour_cosine": {"outliers": 0.93 if sick else None, "others": 0.71},
        "note": "" if sick else "no second mode",
    }


def smooth(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Smooth random fields over the last two axes, each within 0 and 1."""
    field_ = ndimage.gaussian_filter(draw.standard_normal(shape), [0] * (len(shape) - 2) + [2, 2], mode="reflect")
    low, high = field_.min((-2, -1), keepdims=True), field_.max((-2, -1), keepdims=True)
    return (field_ - low) / np.maximum(high - low, 1e-9)


def _norms(model: FakeModel, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shape = (model.images, model.depth, *model.grid)
    grow = np.linspace(0.6, 1.0, model.depth)[:, None, None]
    norms = 47 * grow * (0.85 + 0.25 * smooth(draw, *shape) + 0.03 * draw.standard_normal(shape))
    masks = np.zeros((model.images, *model.grid), bool)
    if model.outliers is not None:
        plain = smooth(draw, model.images, *model.grid) + 0.35 * draw.random(masks.shape)
        masks = plain >= np.quantile(plain, 1 - model.share)
        factor = model.outliers * (1 + 0.08 * draw.standard_normal(masks.shape))
        late = np.arange(model.depth) >= model.onset
        norms = np.where(masks[:, None] & late[None, :, None, None], norms * factor[:, None], norms)
    return norms, masks


def _arrays(model: FakeModel, draw: np.random.Generator, norms: np.ndarray, masks: np.ndarray) -> dict[str, np.ndarray]:
    count = min(model.images, 8)
    queries = 1 + model.registers
    edges = np.geomspace(norms.min() * 0.999, norms.max() * 1.001, BINS + 1)
    height, width = _size(model)
    pixels = np.moveaxis(smooth(draw, count, 3, height, width) * 255, 1, -1).astype(np.uint8)
    attention = smooth(draw, count, queries, *model.grid) ** 3 + 0.01
    attention = np.where(masks[:count, None], attention + 3, attention) if model.outliers else attention
    received = smooth(draw, count, *model.grid) + 0.3
    pca = np.moveaxis(smooth(draw, count, 3, *model.grid), 1, -1)
    pca = np.where(masks[:count, ..., None], [0.95, 0.2, 0.85], pca)
    found = {
        "thumbnails": pixels if model.photos is None else model.photos,
        "norm_maps": norms[:count, -1],
        "norm_maps_last": norms[:count, -1],
        "outlier_masks": masks[:count],
        "attention_maps": attention / attention.sum((-2, -1), keepdims=True) * 0.8,
        "received_maps": received / received.sum((-2, -1), keepdims=True),
        "pca_maps": pca,
        "score_maps": 0.2 + 0.5 * smooth(draw, count, *model.grid),
        "position_frequency": masks.mean(0),
        "histogram_counts": np.stack([np.histogram(norms[:, block], edges)[0] for block in range(model.depth)]),
        "histogram_edges": edges,
    }
    if model.planted:
        planted = masks[:count].copy()
        planted[0, 0, 0] = True
        found["planted_masks"] = planted
    return {
        key: value.astype(np.float32) if value.dtype.kind == "f" and "edges" not in key else value
        for key, value in found.items()
    }


def _measures(model: FakeModel) -> dict[str, Any]:
    blocks = np.arange(model.depth)
    registers = None
    if model.registers:
        registers = {
            "count": model.registers,
            "norms": [60.0 + 5 * index for index in range(model.registers)],
            "attention_received": [0.05 + 0.01 * index for index in range(model.registers)],
            "effective_number": 0.8 * model.registers,
        }
    received = {"cls": (0.02 + 0.01 * blocks).tolist()}
    if model.registers:
        received["registers"] = (0.03 * model.registers * np.ones(model.depth)).tolist()
    return {
        "attention_sink": {
            "found": False,
            "share": 0.004,
            "block": 3,
            "mass": 0.012,
            "strongest": 6.1,
            "mass_by_block": (0.003 * blocks).tolist(),
            "received_by": received,
        },
        "positional": {"found": False, "variance_explained": 0.123},
        "inconsistent": None,
        "lazy": None,
        "registers": registers,
    }


def _entry_changes(entry: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(changes)
    for key in ("measures", "images"):
        if key in changes and changes[key] is not None:
            merged[key] = {**entry[key], **changes[key]}
    return merged


def _size(model: FakeModel) -> list[int]:
    return [14 * side for side in model.grid]
