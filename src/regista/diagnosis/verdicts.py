"""Did the cure help: a verdict on a model against a reference, by explicit rules."""

from __future__ import annotations

from dataclasses import dataclass

from regista.diagnosis.findings import SINK_MASS

HALF = 0.5
RISE = 1.5
KEPT = 0.9
UNCHANGED = 0.99
STILL_THERE = 0.5
RULES = {
    "fell_to": HALF,
    "risen_from": RISE,
    "kept_from": KEPT,
    "unchanged_from": UNCHANGED,
    "sinks_from": SINK_MASS,
    "denoised_below": STILL_THERE,
}


@dataclass(frozen=True)
class Facts:
    """What the verdict is made of; None where it was not measured.

    Attributes:
        outlier_share: Share of patch tokens of outlier norm.
        sink_mass: Share of all attention that patch sinks take.
        others: Mean cosine to the reference in cells that are no outliers there.
        former: Mean cosine to the reference's denoised features in cells that are outliers there.
        cost: Time an image over the reference's.
        cost_range: The lowest and the highest round.
        reason: Why features were not compared.
    """

    outlier_share: float
    sink_mass: float | None = None
    others: float | None = None
    former: float | None = None
    cost: float | None = None
    cost_range: tuple[float, float] = (1.0, 1.0)
    reason: str = ""


@dataclass(frozen=True)
class Judgement:
    """A word ("cured", "fewer artifacts", "no gain", "changed", "mixed", "worse"), and its numbers in a sentence."""

    verdict: str
    sentence: str


def judge(reference: Facts, model: Facts) -> Judgement:
    """A verdict on ``model`` against ``reference``.

    Two amounts are judged: the share of outlier tokens, and the attention that patch sinks take
    (sinks count from 5 % on). An amount fell if at most half is left, and rose if it is there and
    at least 1.5 times what it was.

    - worse: one rose, none fell. mixed: one rose, the other fell.
    - no gain: none fell; also if there was nothing to cure.
    - changed: one fell, but the other patches do not keep a mean cosine of 0.9 to the reference.
    - cured: all that were there are gone, the other patches kept their features, and the former
      outlier cells, where that can be judged, came closer to the reference's denoised features.
    - fewer artifacts: one fell, and one of the conditions of "cured" does not hold or is not known.
    """
    changes = [_change(reference.outlier_share, model.outlier_share, 0.0)]
    if reference.sink_mass is not None and model.sink_mass is not None:
        changes.append(_change(reference.sink_mass, model.sink_mass, SINK_MASS))
    verdict = _verdict(changes, reference, model)
    clauses = [*_amounts(changes, reference, model), *_features(reference, model)]
    if model.cost is not None:
        low, high = model.cost_range
        clauses.append(f"{model.cost:.2f}x the cost" + (" (within noise)" if low < 1 < high else ""))
    return Judgement(verdict, ", ".join(clauses))


def describe_reference(reference: Facts) -> str:
    """What the first model has, in a sentence."""
    clauses = [f"outliers {percent(reference.outlier_share)}" if reference.outlier_share else "no outliers"]
    if reference.sink_mass is not None:
        found = reference.sink_mass >= SINK_MASS
        clauses.append(f"sinks take {percent(reference.sink_mass)} of attention" if found else "no attention sinks")
    return ", ".join(clauses)


def percent(share: float) -> str:
    """A share for a sentence: 0.0234 -> "2.3 %"; what is there is never "0.0 %"."""
    return "under 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def _change(before: float, after: float, least: float) -> str:
    """What became of an amount: "absent", "risen", "gone", "halved" or "same"; it counts above ``least``."""
    there_before, there_after = (value > 0 and value >= least for value in (before, after))
    if there_after and after >= RISE * before:
        return "risen"
    if there_before and after <= HALF * before:
        return "halved" if there_after else "gone"
    return "same" if there_before or there_after else "absent"


def _verdict(changes: list[str], reference: Facts, model: Facts) -> str:
    fell = any(change in ("gone", "halved") for change in changes)
    if "risen" in changes:
        return "mixed" if fell else "worse"
    if not fell:
        return "no gain"
    if model.others is None:
        return "fewer artifacts"
    if model.others < KEPT:
        return "changed"
    gone = all(change in ("gone", "absent") for change in changes)
    return "cured" if gone and _recovered(reference, model) is not False else "fewer artifacts"


def holds_outliers(former: float | None) -> bool:
    """Whether denoised features are no judge of former outlier cells, for they still hold the outliers.

    Outliers that follow the content come back in every shifted view and stay in the mean.

    Args:
        former: Mean cosine of the reference's own features to its denoised ones in its outlier cells.
    """
    return former is not None and former >= STILL_THERE


def _recovered(reference: Facts, model: Facts) -> bool | None:
    """Whether former outlier cells came closer to denoised features; None if that cannot be judged."""
    if reference.former is None or model.former is None or holds_outliers(reference.former):
        return None
    return model.former > reference.former


def _amounts(changes: list[str], reference: Facts, model: Facts) -> list[str]:
    outliers, *sinks = changes
    clauses = [f"outliers {percent(reference.outlier_share)} -> {percent(model.outlier_share)}"]
    if outliers == "absent":
        clauses = ["no outliers in either"]
    if sinks and sinks != ["absent"]:
        before, after = reference.sink_mass or 0.0, model.sink_mass or 0.0
        clauses.append(f"sinks {percent(before)} -> {percent(after)} of attention")
    if all(change == "absent" for change in changes):
        clauses = ["nothing to cure: no outliers" + (" and no attention sinks" if sinks else "") + " in either"]
    return clauses


def _features(reference: Facts, model: Facts) -> list[str]:
    if model.others is None:
        return [f"features not compared: {model.reason}"] if model.reason else []
    what = "unchanged" if model.others >= UNCHANGED else "nearly unchanged" if model.others >= KEPT else "changed"
    clauses = [f"{'other' if reference.outlier_share else 'all'} patches {what} (cosine {model.others:.3f})"]
    closer = _recovered(reference, model)
    if closer is not None:
        word = "closer" if closer else "no closer"
        numbers = f"{reference.former:.2f} -> {model.former:.2f}"
        clauses.append(f"former outlier cells {word} to denoised features (cosine {numbers})")
    return clauses
