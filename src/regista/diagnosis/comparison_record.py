"""What a comparison of models says, and how it lies in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regista.diagnosis.agreement import Agreement
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.record import Diagnosis, diagnosis_entries
from regista.diagnosis.throughput import Throughput
from regista.diagnosis.verdicts import RULES
from regista.results import RunFolder

REFERENCE = "reference"
KIND = "comparison"


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison.

    Attributes:
        diagnosis: Of this model alone; its PCA pictures share the reference's colours if ``shared_pca``.
        verdict: Against the reference: "cured", "fewer artifacts", "no gain", "changed", "mixed" or
            "worse"; "reference" for the first.
        sentence: The numbers behind it.
        parameters: Of the module.
        to_reference: Cosine of its patch features to the reference's; None for the reference,
            and where ``reason`` says why there is none.
        to_denoised: The same to the reference's denoised features; None also if there are none.
        reason: Why features were not compared, or "".
        throughput: Speed beside the reference; None if it was not measured.
        shared_pca: PCA pictures have the basis of the reference.
        norm_block: The block at which the pictured norms are read.
    """

    diagnosis: Diagnosis
    verdict: str
    sentence: str
    parameters: int
    to_reference: Agreement | None
    to_denoised: Agreement | None
    reason: str
    throughput: Throughput | None
    shared_pca: bool
    norm_block: int

    @property
    def num_register_tokens(self) -> int:
        """R, as counted in the loaded model."""
        return self.diagnosis.layout.num_register_tokens

    @property
    def effective_registers(self) -> float | None:
        """How many directions the registers use; None without registers."""
        registers = self.diagnosis.measures.get("registers")
        return None if registers is None else float(registers["effective_number"])

    @property
    def sink_mass(self) -> float | None:
        """Share of all attention that patch sinks take; None if attention was not looked at."""
        sinks = self.diagnosis.measures.get("attention_sink")
        return None if sinks is None else float(sinks["mass"])

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values, with the numbers of the comparison under ``comparison``."""
        return {
            **self.diagnosis.to_dict(),
            "comparison": {
                "reference": self.verdict == REFERENCE,
                "verdict": self.verdict,
                "sentence": self.sentence,
                "parameters": self.parameters,
                "effective_registers": self.effective_registers,
                "to_reference": None if self.to_reference is None else self.to_reference.to_dict(),
                "to_denoised": None if self.to_denoised is None else self.to_denoised.to_dict(),
                "reason": self.reason,
                "throughput": None if self.throughput is None else self.throughput.to_dict(),
                "shared_pca": self.shared_pca,
                "norm_block": self.norm_block,
            },
        }


@dataclass(frozen=True)
class Comparison:
    """Several models on the same images.

    Attributes:
        models: The first is the reference.
        notes: What limits the comparison, such as models that got images of other sizes.
    """

    models: tuple[ComparedModel, ...]
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> ComparedModel:
        """The model that the others are compared with."""
        return self.models[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; what ``regista compare --json`` prints."""
        return {
            "reference": self.reference.diagnosis.model,
            "rules": dict(RULES),
            "notes": list(self.notes),
            "models": [model.to_dict() for model in self.models],
        }

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write record and arrays into a run folder of kind "comparison", for ``regista report``.

        Raises:
            ValueError: if the folder holds something and ``force`` is False.
        """
        run = RunFolder.create(Path(folder), KIND, force=force)
        save_comparison(run, self)
        return run.path


def save_comparison(
    run: RunFolder, found: Comparison, *, config: DiagnosisConfig | None = None, weights: Sequence[str] = ()
) -> None:
    """Write a comparison into a run folder: ``models`` as of a diagnosis, each with its ``comparison``.

    Args:
        config: The settings it was made with.
        weights: Hash of each model's weights, see ``regista.backbones.weights.weights_hash``.
    """
    diagnoses = [model.diagnosis for model in found.models]
    entries = diagnosis_entries(run, diagnoses, weights)
    models = [{**entry, **model.to_dict()} for entry, model in zip(entries, found.models, strict=True)]
    run.update(
        models=models,
        config=config.to_dict() if config else {},
        skipped=diagnoses[0].images["skipped"],
        notes=list(found.notes),
        rules=dict(RULES),
    )
