"""How alike the patch features of two models are, in cells that were outliers and in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.diagnosis.arrays import ArrayStore
from regista.diagnosis.measuring import PICTURED
from regista.diagnosis.source import ImageSource
from regista.tokens import TokenLayout

Denoise = Callable[[Backbone, Tensor], Tensor]


@dataclass(frozen=True)
class Likeness:
    """Cosine between the features of the same cells in two models.

    Attributes:
        mean: Over the cells of all images.
        p05: The 5th percentile: one cell in twenty lies below.
        cells: How many.
    """

    mean: float
    p05: float
    cells: int


@dataclass(frozen=True)
class Agreement:
    """Likeness in the two kinds of cells; None where there is no such cell.

    Attributes:
        former_outliers: Cells that are outliers in the reference.
        others: All other cells that hold image content.
    """

    former_outliers: Likeness | None
    others: Likeness | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the record."""
        return asdict(self)


@dataclass
class FeatureComparison:
    """Features of one model beside those of the reference.

    Attributes:
        reason: Why they were not compared; "" if they were.
        to_reference: To the reference's own features; None for the reference.
        to_denoised: To the reference's denoised features.
        pictured: (k, P, D) features of the first images; None if they were not compared.
    """

    reason: str = ""
    to_reference: Agreement | None = None
    to_denoised: Agreement | None = None
    pictured: Tensor | None = field(default=None, repr=False)


def split_agreement(cosine: Tensor, outliers: Tensor, valid: Tensor) -> Agreement:
    """Statistics of a cosine in the reference's outlier cells and in the others.

    Args:
        cosine: (n, rows, cols).
        outliers: (n, rows, cols) bool, of the reference.
        valid: (n, rows, cols) bool, cells that hold image content.
    """
    return Agreement(_likeness(cosine[valid & outliers]), _likeness(cosine[valid & ~outliers]))


def why_not(reference: TokenLayout, layout: TokenLayout, widths: tuple[int, int]) -> str:
    """Why features of two models have no cosine cell by cell; "" if they have.

    Args:
        reference, layout: Token layouts of the reference and of the model.
        widths: D of the reference and of the model.
    """
    found = []
    if layout.grid_size != reference.grid_size:
        (rows, cols), (own_rows, own_cols) = reference.grid_size, layout.grid_size
        found.append(f"its patch grid is {own_rows} x {own_cols}, the reference's {rows} x {cols}")
    if widths[1] != widths[0]:
        found.append(f"its features have {widths[1]} channels, the reference's {widths[0]}")
    return " and ".join(found)


@torch.inference_mode()
def compare_features(
    backbones: Sequence[Backbone],
    sources: Sequence[ImageSource],
    outliers: Tensor,
    *,
    denoise: Denoise | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[FeatureComparison]:
    """Cosine of each model's final patch features to those of the first, cell by cell.

    Args:
        backbones: The first is the reference.
        sources: The same images for each model, in its own normalisation.
        outliers: (n, rows, cols) bool, of the reference.
        denoise: (backbone, pixels (B, 3, H, W)) -> (B, P, D), of the reference.
        progress: Called with the number of images done.

    Raises:
        ValueError: if the models got other numbers of images, or ``denoise`` gives another shape.
    """
    stores = [ArrayStore(source.capacity) for source in sources]
    found = [FeatureComparison() for _ in backbones]
    pictured: list[list[Tensor]] = [[] for _ in backbones]
    done = 0
    for batches in zip(*sources, strict=True):
        (pixels, _), *_ = batches
        reference = backbones[0](pixels)
        raw = reference.patches.float()
        clean = _denoised(denoise, backbones[0], pixels, raw)
        for index, (backbone, (own, valid)) in enumerate(zip(backbones, batches, strict=True)):
            layout = backbone.layout((own.shape[-2], own.shape[-1]))
            found[index].reason = why_not(reference.layout, layout, (raw.shape[-1], backbone.embed_dim))
            if found[index].reason:
                continue
            patches = raw if index == 0 else backbone(own).patches.float()
            if index:
                stores[index].put("raw", done, _cosine(patches, raw, layout))
            if clean is not None:
                stores[index].put("denoised", done, _cosine(patches, clean, layout))
            stores[index].put("valid", done, valid.float())
            room = min(len(own), max(0, PICTURED - done))
            pictured[index].append(patches.narrow(0, 0, room).cpu())
        done += len(pixels)
        if progress is not None:
            progress(done)
    for comparison, store, kept in zip(found, stores, pictured, strict=True):
        if not comparison.reason:
            store.trim(done)
            _conclude(comparison, store, outliers)
            comparison.pictured = torch.cat(kept)
    return found


def _conclude(comparison: FeatureComparison, store: ArrayStore, outliers: Tensor) -> None:
    valid = store.get("valid") > 0.5
    if "raw" in store:
        comparison.to_reference = split_agreement(store.get("raw"), outliers, valid)
    if "denoised" in store:
        comparison.to_denoised = split_agreement(store.get("denoised"), outliers, valid)


def _denoised(denoise: Denoise | None, backbone: Backbone, pixels: Tensor, raw: Tensor) -> Tensor | None:
    if denoise is None:
        return None
    clean = denoise(backbone, pixels)
    if clean.shape != raw.shape:
        raise ValueError(f"denoise gives patch features {tuple(raw.shape)} like the model, got {tuple(clean.shape)}")
    return clean.float()


def _cosine(patches: Tensor, others: Tensor, layout: TokenLayout) -> Tensor:
    """(B, P, D) twice -> (B, rows, cols)."""
    return layout.to_grid(torch.cosine_similarity(patches, others.to(patches.device), dim=-1))


def _likeness(values: Tensor) -> Likeness | None:
    if not values.numel():
        return None
    ordered = values.double()
    return Likeness(float(ordered.mean()), _percentile(ordered, 0.05), values.numel())


def _percentile(values: Tensor, share: float) -> float:
    """``numpy.quantile`` of any number of values; torch's takes 16 million at most."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))
