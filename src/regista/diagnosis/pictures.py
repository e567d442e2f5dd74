"""Arrays that the report draws: maps of the first images, histogram, frequency of places."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regista.diagnosis.findings import HighNorm, Sink
from regista.diagnosis.measuring import Measured
from regista.diagnosis.pca import pca_maps

BINS = 80


def picture_arrays(measured: Measured, high: HighNorm, sink: Sink | None) -> dict[str, np.ndarray]:
    """Everything a page needs, keyed as the run folder stores it; k = pictured images.

    thumbnails (k, h, w, 3) uint8 · norm_maps, norm_maps_last, received_maps, score_maps,
    consistency_maps, outlier_masks, planted_masks (k, rows, cols) · attention_maps
    (k, Q, rows, cols) · pca_maps (k, rows, cols, 3) in [0, 1] · position_frequency
    (rows, cols) · histogram_counts (blocks, bins) and histogram_edges (bins + 1).
    """
    count = len(measured.pictured["patches"])
    norms = measured.grid("norms")
    block = norms.shape[1] - 1 if high.block is None else high.block
    found: dict[str, Tensor] = {
        "thumbnails": measured.pictured["thumbnails"],
        "norm_maps": norms[:count, block],
        "norm_maps_last": norms[:count, -1],
        "outlier_masks": high.mask[:count],
        "position_frequency": high.mask.float().mean(0),
        "pca_maps": pca_maps(measured.pictured["patches"], measured.layout.grid_size),
    }
    if "attention" in measured.pictured:
        found["attention_maps"] = measured.pictured["attention"]
    if sink is not None:
        found["received_maps"] = measured.grid("received")[:count, sink.block]
    for name, key in (("scores", "score_maps"), ("consistency", "consistency_maps"), ("planted", "planted_masks")):
        values = measured.optional(name)
        if values is not None:
            found[key] = values[:count] > 0.5 if name == "planted" else values[:count]
    found["histogram_counts"], found["histogram_edges"] = histogram(norms)
    return {name: np.ascontiguousarray(value.cpu().numpy()) for name, value in found.items()}


def histogram(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Counts of norms by block over common, log-spaced bins: (n, blocks, rows, cols) -> (blocks, bins), (bins + 1,)."""
    low = max(float(norms.min()), 1e-6)
    high = max(float(norms.max()), low * 1.01)
    edges = torch.logspace(np.log10(low * 0.999), np.log10(high * 1.001), BINS + 1, dtype=torch.float64)
    counts = [
        np.histogram(norms[:, block].numpy().reshape(-1), bins=edges.numpy())[0] for block in range(norms.shape[1])
    ]
    return torch.from_numpy(np.stack(counts)), edges
