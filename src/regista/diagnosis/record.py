"""What a diagnosis says, and how it lies in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regista.diagnosis.config import DiagnosisConfig
from regista.results import RunFolder
from regista.tokens import TokenLayout

SCHEMA = 1


@dataclass(frozen=True)
class Diagnosis:
    """The state of one model on some images. Blocks count from 0, shares are fractions.

    Attributes:
        model, library: What was looked at.
        verdict: "clean" or "artifacts".
        kinds: Of "high-norm", "attention-sink", "positional", "inconsistent", "lazy".
        summary: The verdict in words, one sentence a finding, with the numbers.
        outliers: (n, rows, cols) bool, patch tokens of outlier norm at ``outlier_block``.
        norms: (n, blocks, rows, cols) float32, norms of the patch tokens before the final
            norm; beyond 256 images memory-mapped from disk.
        onset_block: The first block whose output has the outliers, or None.
        outlier_block: The block at which ``outliers`` and ``cutoff`` are read, or None.
        cutoff: The norm from which a token counts as an outlier, or None.
        share: Share of patch tokens that are outliers.
        fixed_place: "fixed" (same cells in all images), "moving", or None.
        layout: Token layout.
        images: count, names, size (height, width), skipped [(path, reason)], note.
        measures: Numbers behind every kind; None where a kind was not looked at.
        arrays: Pictures' data for the report, at most 8 images.
        attention_queries: What the attention maps show.
        planted: Ground truth and how well it was found, or None.
    """

    model: str
    library: str
    verdict: str
    kinds: tuple[str, ...]
    summary: tuple[str, ...]
    outliers: Tensor
    norms: Tensor
    onset_block: int | None
    outlier_block: int | None
    cutoff: float | None
    share: float
    fixed_place: str | None
    layout: TokenLayout
    images: dict[str, Any]
    measures: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(repr=False)
    attention_queries: list[str]
    attention_backend: str
    planted: dict[str, Any] | None = None
    keep_alive: object = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; what ``regista diagnose --json`` prints."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "library": self.library,
            "verdict": self.verdict,
            "kinds": list(self.kinds),
            "summary": list(self.summary),
            "planted": self.planted,
            "images": self.images,
            "grid_size": list(self.layout.grid_size),
            "patch_size": self.layout.patch_size,
            "depth": self.norms.shape[1],
            "num_register_tokens": self.layout.num_register_tokens,
            "has_cls": bool(self.layout.count("cls")),
            "attention_backend": self.attention_backend,
            "attention_queries": self.attention_queries,
            "onset_block": self.onset_block,
            "outlier_block": self.outlier_block,
            "cutoff": self.cutoff,
            "share": self.share,
            "fixed_place": self.fixed_place,
            "outlier_positions": [torch.nonzero(mask).tolist() for mask in self.outliers],
            "measures": self.measures,
        }

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write record and arrays into a run folder, for ``regista report``.

        Raises:
            ValueError: if the folder holds something and ``force`` is False.
        """
        run = RunFolder.create(Path(folder), "diagnosis", force=force)
        save_diagnoses(run, [self])
        return run.path


def save_diagnoses(
    run: RunFolder,
    found: Sequence[Diagnosis],
    *,
    config: DiagnosisConfig | None = None,
    notes: Sequence[str] = (),
    weights: Sequence[str] = (),
) -> None:
    """Write several diagnoses into one run folder: ``models`` in the record, arrays beside.

    Args:
        config: The settings they were made with.
        notes: For a reader of the record.
        weights: Hash of each model's weights, see ``regista.backbones.weights.weights_hash``.
    """
    models = diagnosis_entries(run, found, weights)
    skipped = [skipped for diagnosis in found[:1] for skipped in diagnosis.images["skipped"]]
    run.update(models=models, config=config.to_dict() if config else {}, skipped=skipped, notes=list(notes))


def diagnosis_entries(run: RunFolder, found: Sequence[Diagnosis], weights: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Write the arrays of several diagnoses; the entries for ``models``, which name them."""
    models: list[dict[str, Any]] = []
    for index, diagnosis in enumerate(found):
        name = f"arrays/{index:02d}"
        run.write_arrays(name, diagnosis.arrays)
        models.append({**diagnosis.to_dict(), "arrays": name})
        if weights:
            models[-1]["weights_hash"] = weights[index]
    return models
