"""One model's entry in the record of a comparison, read with care."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regista.report.entry import ModelEntry, mapping, number, numbers, read_entry, whole

TONES = {"cured": "good", "fewer artifacts": "good", "changed": "bad", "mixed": "bad", "worse": "bad"}


@dataclass(frozen=True)
class Likeness:
    """Cosine of features over some cells: mean and 5th percentile."""

    mean: float
    p05: float | None
    cells: int | None


@dataclass(frozen=True)
class ComparedEntry:
    """What a comparison says about one model.

    Attributes:
        entry: Its diagnosis.
        reference: Whether it is the model that the others are compared with.
        verdict, sentence: The verdict against the reference, and its numbers.
        parameters, effective_registers: None if unknown or without registers.
        former, others: Cosine to the reference in its former outlier cells and in the others.
        denoised_former, denoised_others: The same to the reference's denoised features.
        reason: Why features were not compared, or "".
        images_per_second, cost, cost_range: Speed, and time an image over the reference's.
        batch_size: Images a forward when speed was measured.
        shared_pca: Its PCA colours are those of the reference.
        norm_block: The block at which its norms are pictured.
    """

    entry: ModelEntry
    reference: bool
    verdict: str
    sentence: str
    parameters: int | None
    effective_registers: float | None
    former: Likeness | None
    others: Likeness | None
    denoised_former: Likeness | None
    denoised_others: Likeness | None
    reason: str
    images_per_second: float | None
    cost: float | None
    cost_range: tuple[float | None, ...]
    batch_size: int | None
    shared_pca: bool
    norm_block: int | None

    @property
    def tone(self) -> str:
        """How the verdict is coloured: "good", "bad", or "" for neither."""
        known = self.others is not None or self.verdict != "fewer artifacts"  # of an unlike model that is no praise
        return TONES.get(self.verdict, "") if known else ""

    @property
    def cost_is_noise(self) -> bool:
        """Whether rounds lie on both sides of 1, so that the cost says nothing."""
        low, high = (*self.cost_range, None, None)[:2]
        return low is not None and high is not None and low < 1 < high


def read_compared(records: Sequence[Mapping[str, Any]]) -> list[ComparedEntry]:
    """The models of a comparison, from ``models`` of ``Comparison.to_dict()`` or of a run folder.

    Raises:
        ValueError: if they are no such entries.
    """
    return [_read(record) for record in records]


def _read(record: Mapping[str, Any]) -> ComparedEntry:
    entry, found = read_entry(record), mapping(record.get("comparison"))
    if not found.get("verdict"):
        raise ValueError(f"{entry.model} has no comparison; make one with `regista compare`")
    reference, denoised = mapping(found.get("to_reference")), mapping(found.get("to_denoised"))
    speed = mapping(found.get("throughput"))
    return ComparedEntry(
        entry=entry,
        reference=bool(found.get("reference")),
        verdict=str(found["verdict"]),
        sentence=str(found.get("sentence") or ""),
        parameters=whole(found.get("parameters")),
        effective_registers=number(found.get("effective_registers")),
        former=_likeness(reference.get("former_outliers")),
        others=_likeness(reference.get("others")),
        denoised_former=_likeness(denoised.get("former_outliers")),
        denoised_others=_likeness(denoised.get("others")),
        reason=str(found.get("reason") or ""),
        images_per_second=number(speed.get("images_per_second")),
        cost=number(speed.get("cost")),
        cost_range=numbers(speed.get("cost_range")),
        batch_size=whole(speed.get("batch_size")),
        shared_pca=bool(found.get("shared_pca")),
        norm_block=whole(found.get("norm_block")),
    )


def _likeness(value: Any) -> Likeness | None:
    found = mapping(value)
    mean = number(found.get("mean"))
    return None if mean is None else Likeness(mean, number(found.get("p05")), whole(found.get("cells")))
