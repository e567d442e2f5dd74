"""Is this model sick: one pass over the images, every finding, a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.loading import load
from regista.data.annotations import Targets
from regista.diagnosis import findings
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.consistency import shift_consistency
from regista.diagnosis.measuring import Measured, measure
from regista.diagnosis.pictures import picture_arrays
from regista.diagnosis.record import Diagnosis
from regista.diagnosis.source import ImageSource


@torch.inference_mode()
def diagnose(
    backbone: Backbone | nn.Module | str,
    images: Any,
    *,
    batch_size: int = 8,
    cutoff: float | None = None,
    config: DiagnosisConfig | None = None,
    targets: Targets | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Look for artifacts in the patch tokens of a ViT.

    Args:
        backbone: From ``regista.load``, or what it takes.
        images: A preprocessed float tensor (n, 3, H, W), or raw images as
            ``Backbone.preprocess`` takes them: paths, folders, PIL images, arrays.
        batch_size: Images a forward; the result does not depend on it.
        cutoff: Norm from which a patch token is an outlier; found in the norms if None.
        config: All settings at once; ``batch_size`` and ``cutoff`` are then taken from it.
        targets: Boxes or masks of objects, to judge lazy aggregation.
        names: Of the images, for the record.
        progress: Called with the number of images done.

    Returns:
        The ``Diagnosis``. Outliers are judged per block before the final norm (Darcet et al.,
        2309.16588, section 2); a model with registers is measured like any other.

    Raises:
        ValueError: for images that cannot be used, or NaN and infinite values (naming block
            and image).
    """
    backbone = load(backbone)
    config = config or DiagnosisConfig(batch_size=batch_size, cutoff=cutoff)
    source = ImageSource(backbone, images, config, targets=targets, names=names)

    def consistency(pixels: Tensor, patches: Tensor) -> Tensor:
        return shift_consistency(backbone, pixels, patches)

    measured = measure(
        backbone,
        source,
        source.capacity,
        attention=config.attention,
        consistency=consistency if config.consistency else None,
        progress=progress,
    )
    return _judge(backbone, measured, source, config)


def _judge(backbone: Backbone, measured: Measured, source: ImageSource, config: DiagnosisConfig) -> Diagnosis:
    norms = measured.grid("norms")  # (n, blocks, rows, cols)
    valid = measured.valid()
    high = findings.high_norm(norms, valid, config.cutoff, measured.optional("neighbours"))
    sink = findings.attention_sink(measured, valid) if config.attention else None
    others = {
        "attention-sink": sink,
        "positional": findings.positional(measured),
        "inconsistent": findings.inconsistent(measured, valid),
        "lazy": findings.lazy(measured, source.foreground),
    }
    kinds = [kind for kind, finding in {"high-norm": high, **others}.items() if finding is not None and finding.found]
    registers = findings.registers(measured)
    said = [finding for finding in (high, *others.values(), registers) if finding is not None]
    planted = findings.planted_truth(backbone, measured, high.mask)
    return Diagnosis(
        model=backbone.name,
        library=backbone.library,
        verdict="artifacts" if kinds else "clean",
        kinds=tuple(kinds),
        summary=tuple(finding.sentence for finding in said if finding.sentence),
        outliers=high.mask,
        norms=norms,
        onset_block=high.onset_block,
        outlier_block=high.block,
        cutoff=high.cutoff,
        share=high.share,
        fixed_place=high.fixed_place,
        layout=measured.layout,
        images={
            "count": measured.count,
            "names": source.names,
            "size": list(measured.layout.image_size),
            "skipped": [list(skipped) for skipped in source.skipped],
            "note": source.note,
        },
        measures={
            "high_norm": high.numbers,
            **{kind.replace("-", "_"): finding.numbers if finding else None for kind, finding in others.items()},
            "registers": registers.numbers if registers else None,
        },
        arrays=picture_arrays(measured, high, sink),
        attention_queries=measured.queries,
        attention_backend=backbone.attention_backend(),
        planted=planted,
        keep_alive=measured.arrays.keep_alive(),
    )
