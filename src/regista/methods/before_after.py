"""The numbers of a cure: outliers before and after on the same images, and what its training was judged by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regista.backbones.base import Backbone
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose

MOST_IMAGES = 64
HELD_OUT = {
    "held_out_cosine": "held-out cosine to the target",
    "held_out_outlier_share": "held-out outlier share",
}


def before_and_after(
    before: Backbone, after: Backbone, images: Sequence[Path], *, config: DiagnosisConfig | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Diagnose both models on the same images, at most 64 of them.

    Args:
        before, after: The second comes from ``regista.fix`` of the first.
        images: Files; without any only the numbers of the training, if there was one, are given.
        config: Of the diagnosis.

    Returns:
        [{"measure", "before", "after"}] and cautions: that it is no cure, in words.
    """
    records: list[dict[str, Any]] = []
    cautions: list[str] = []
    if images:
        shown = list(images)[:MOST_IMAGES]
        was, now = (diagnose(model, shown, config=config) for model in (before, after))
        ratios = [found.measures["high_norm"]["ratio"] for found in (was, now)]
        records += [
            {"measure": "verdict (norms)", "before": was.verdict, "after": now.verdict},
            {"measure": "outlier share", "before": round(was.share, 6), "after": round(now.share, 6)},
            {"measure": "outlier norm / median", "before": ratios[0], "after": ratios[1]},
        ]
        cautions = no_cure(was.share, now.share)
    state = after.history[-1]["state"] if after.history else {}
    first, last = state.get("before"), state.get("after")
    if isinstance(first, dict) and isinstance(last, dict):
        records += [
            {"measure": words, "before": round(first[name], 6), "after": round(last[name], 6)}
            for name, words in HELD_OUT.items()
            if name in first and name in last
        ]
    return records, cautions


def no_cure(before: float, after: float) -> list[str]:
    """A caution if outliers are as many as before, or more: shares of the patches, 0 to 1."""
    if not after or after < before:
        return []
    if not before:
        return [f"there were no outliers before, and {after:.2%} of the patches are outliers now"]
    return [f"no cure: {after:.2%} of the patches are outliers, before it were {before:.2%}"]
