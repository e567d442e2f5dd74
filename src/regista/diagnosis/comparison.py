"""Several models on the same images: usually a sick one, and its cures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.loading import load
from regista.diagnosis.agreement import Agreement, Denoise, FeatureComparison, compare_features
from regista.diagnosis.comparison_record import REFERENCE, ComparedModel, Comparison
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose
from regista.diagnosis.pca import fit_colours
from regista.diagnosis.record import Diagnosis
from regista.diagnosis.source import ImageSource
from regista.diagnosis.throughput import Throughput, measure_throughput
from regista.diagnosis.verdicts import Facts, describe_reference, holds_outliers, judge

SAME_SPACE = 0.5


@torch.inference_mode()
def compare(
    backbones: Sequence[Backbone | nn.Module | str],
    images: Any,
    *,
    batch_size: int = 8,
    denoise: Denoise | None = None,
    config: DiagnosisConfig | None = None,
    timed_rounds: int = 5,
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Diagnose several models on the same images and judge each against the first.

    All models are in memory together and get the same pixels, each in its own normalisation.

    Args:
        backbones: From ``regista.load``, or what it takes; two or more. The first is the reference.
        images: As ``diagnose`` takes them; a preprocessed tensor is one of the reference's.
        batch_size: Images a forward; no result but the speed depends on it.
        denoise: (backbone, pixels (B, 3, H, W)) -> patch features (B, P, D) without artifacts, such
            as ``regista.methods.phreg.denoise``. It is called on the reference alone and must not
            depend on the batch. Without it nothing is compared with denoised features.
        config: All settings at once; ``batch_size`` is then taken from it.
        timed_rounds: Turns of each model when speed is measured; 0 leaves speed out.
        names: Of the images, for the record.
        progress: Called with the number of images done: those of every model and, at last, those
            of the comparison of features, so n * (models + 1) in the end.

    Returns:
        The ``Comparison``. Features are compared after the final norm, cell by cell, apart in the
        cells that are outliers in the reference and in the others; a model of another grid or
        width says so in ``reason``.

    Raises:
        ValueError: for fewer than two models, and as ``diagnose`` does.
    """
    if isinstance(backbones, (str, Backbone, nn.Module)) or len(backbones) < 2:
        raise ValueError("a comparison takes two models or more: compare([sick, cured], images)")
    models = [load(backbone) for backbone in backbones]
    config = config or DiagnosisConfig(batch_size=batch_size)
    if isinstance(images, Iterator):  # they are looked at more than once
        images = list(images)
    given = [_normalised_for(images, models[0], model) for model in models]
    step = _Steps(progress)
    diagnoses = [
        step.of(diagnose(model, own, config=config, names=names, progress=step.report))
        for model, own in zip(models, given, strict=True)
    ]
    sources = [ImageSource(model, own, config, names=names) for model, own in zip(models, given, strict=True)]
    features = compare_features(models, sources, diagnoses[0].outliers, denoise=denoise, progress=step.report)
    speeds = _speeds(models, sources, timed_rounds)
    return Comparison(_compared(models, diagnoses, features, speeds), _notes(models, diagnoses, features))


class _Steps:
    """Progress over several passes as one number."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.progress = progress
        self.before = 0

    def report(self, done: int) -> None:
        """So many images of this pass."""
        if self.progress is not None:
            self.progress(self.before + done)

    def of(self, diagnosis: Diagnosis) -> Diagnosis:
        """A pass that is done."""
        self.before += int(diagnosis.images["count"])
        return diagnosis


def _compared(
    models: Sequence[Backbone],
    diagnoses: Sequence[Diagnosis],
    features: Sequence[FeatureComparison],
    speeds: Sequence[Throughput | None],
) -> tuple[ComparedModel, ...]:
    shared = _shares_colours(features)
    diagnoses = _with_shared_colours(diagnoses, features, shared)
    blocks = _norm_blocks(diagnoses)
    facts = [_facts(*parts) for parts in zip(diagnoses, features, speeds, strict=True)]
    compared = []
    for index, (model, diagnosis, own, speed) in enumerate(zip(models, diagnoses, features, speeds, strict=True)):
        verdict, sentence = REFERENCE, describe_reference(facts[0])
        if index:
            judgement = judge(facts[0], facts[index])
            verdict, sentence = judgement.verdict, judgement.sentence
        arrays = {**diagnosis.arrays, "norm_maps": _norm_maps(diagnosis, blocks[index])}
        compared.append(
            ComparedModel(
                diagnosis=replace(diagnosis, arrays=arrays),
                verdict=verdict,
                sentence=sentence,
                parameters=sum(parameter.numel() for parameter in model.module.parameters()),
                to_reference=own.to_reference,
                to_denoised=own.to_denoised,
                reason=own.reason,
                throughput=speed,
                shared_pca=shared[index],
                norm_block=blocks[index],
            )
        )
    return tuple(compared)


def _facts(diagnosis: Diagnosis, features: FeatureComparison, speed: Throughput | None) -> Facts:
    sinks = diagnosis.measures["attention_sink"]
    return Facts(
        outlier_share=diagnosis.share,
        sink_mass=None if sinks is None else sinks["mass"],
        others=_mean(features.to_reference, "others"),
        former=_mean(features.to_denoised, "former_outliers"),
        cost=None if speed is None else speed.cost,
        cost_range=(1.0, 1.0) if speed is None else speed.cost_range,
        reason=features.reason,
    )


def _mean(found: Agreement | None, cells: str) -> float | None:
    likeness = None if found is None else getattr(found, cells)
    return None if likeness is None else float(likeness.mean)


def _shares_colours(features: Sequence[FeatureComparison]) -> list[bool]:
    """Which models live in the reference's feature space, so that its colours mean the same for them."""
    first, *others = features
    return [
        not first.reason,
        *(not own.reason and (_mean(own.to_reference, "others") or 0.0) >= SAME_SPACE for own in others),
    ]


def _with_shared_colours(
    diagnoses: Sequence[Diagnosis], features: Sequence[FeatureComparison], shared: Sequence[bool]
) -> list[Diagnosis]:
    """PCA maps in one basis, that of the reference's patches that are no outliers."""
    pictured = features[0].pictured
    if pictured is None:
        return list(diagnoses)
    healthy = ~diagnoses[0].outliers[: len(pictured)].flatten(1)  # (k, P)
    colours = fit_colours(pictured[healthy] if healthy.any() else pictured)
    found = []
    for diagnosis, own, same in zip(diagnoses, features, shared, strict=True):
        arrays = dict(diagnosis.arrays)
        if same and own.pictured is not None:
            arrays["pca_maps"] = colours.maps(own.pictured, diagnosis.layout.grid_size).numpy()
        found.append(replace(diagnosis, arrays=arrays))
    return found


def _norm_blocks(diagnoses: Sequence[Diagnosis]) -> list[int]:
    """Where each model's norms are pictured: at its outlier block, else where another model of its depth has one."""
    known = {diagnosis.norms.shape[1]: diagnosis.outlier_block for diagnosis in reversed(diagnoses) if _sick(diagnosis)}
    blocks = []
    for diagnosis in diagnoses:
        depth = diagnosis.norms.shape[1]
        block = diagnosis.outlier_block if _sick(diagnosis) else known.get(depth)
        blocks.append(depth - 1 if block is None else block)
    return blocks


def _sick(diagnosis: Diagnosis) -> bool:
    return diagnosis.outlier_block is not None


def _norm_maps(diagnosis: Diagnosis, block: int) -> np.ndarray:
    count = len(diagnosis.arrays["norm_maps"])
    return np.ascontiguousarray(diagnosis.norms[:count, block].cpu().numpy())


def _speeds(models: Sequence[Backbone], sources: Sequence[ImageSource], rounds: int) -> Sequence[Throughput | None]:
    if not rounds:
        return [None] * len(models)
    batches = [pixels for source in sources for pixels, _ in _first(source)]
    return measure_throughput(models, batches, rounds=rounds)


def _first(source: ImageSource) -> Iterator[tuple[Tensor, Tensor]]:
    """The first batch alone."""
    batches = iter(source)
    yield next(batches)


def _normalised_for(images: Any, reference: Backbone, model: Backbone) -> Any:
    """A preprocessed tensor of the reference in the model's own normalisation; other images as they are."""
    same = reference.mean == model.mean and reference.std == model.std
    if same or not isinstance(images, Tensor) or not images.is_floating_point():
        return images
    mean, std, own_mean, own_std = (
        images.new_tensor(values).view(3, 1, 1) for values in (reference.mean, reference.std, model.mean, model.std)
    )
    return (images * std + mean - own_mean) / own_std


def _notes(
    models: Sequence[Backbone], diagnoses: Sequence[Diagnosis], features: Sequence[FeatureComparison]
) -> tuple[str, ...]:
    notes = []
    sizes = [diagnosis.images["size"] for diagnosis in diagnoses]
    if any(size != sizes[0] for size in sizes):
        named = "; ".join(
            f"{diagnosis.model}: {height} x {width} px"
            for diagnosis, (height, width) in zip(diagnoses, sizes, strict=True)
        )
        notes.append(f"The models did not see the same pixels, their image sizes differ: {named}.")
    places = {f"{model.device.type}, {str(model.dtype).removeprefix('torch.')}" for model in models}
    if len(places) > 1:
        notes.append(f"The models run on unlike devices or in unlike precision: {'; '.join(sorted(places))}.")
    former = _mean(features[0].to_denoised, "former_outliers")
    if former is not None and holds_outliers(former):
        notes.append(
            f"The denoised features still hold the outliers of {diagnoses[0].model} (cosine {former:.2f}): they come "
            "back in every shifted view. Whether former outlier cells recovered is left open."
        )
    return tuple(notes)
