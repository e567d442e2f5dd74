"""What a finding means for someone who uses the model, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from regista.report.entry import ModelEntry
from regista.report.formatting import block_range, count, figure
from regista.report.wording import checks, last_outlier_block

_MEANING = {
    "high-norm": (
        "A few patch tokens no longer describe their patch: the model keeps notes about the whole image there. "
        "Work on single patches suffers (segmentation, attention maps, finding objects, matching); "
        "classification from CLS often does not."
    ),
    "attention-sink": (
        "Attention pours into a few patches whatever they show, so an attention map is no evidence of what matters."
    ),
    "positional": (
        "Patches at the same place look alike in unlike images. Clustering and matching find places, not things."
    ),
    "inconsistent": (
        "Some features depend on where the patch grid happens to lie. Cutoffs miss them: their norms need not be high."
    ),
    "lazy": (
        "The image vector leans on background patches. Zero-shot maps and attention from it point at the wrong places."
    ),
}
_NEXT = {
    "high-norm": (
        "Use a checkpoint that was trained with registers, or repair this one: registers added at test time need no "
        "training, self-distilled registers need images without labels. `regista --help` lists what this version can "
        "do. Then diagnose the result on the same images and compare."
    ),
    "attention-sink": "Read patch features instead of attention maps, or attention of an earlier block.",
    "positional": "Subtract the mean feature of each place before clustering or matching; check with unlike images.",
    "inconsistent": "Average the features over a few shifted views, or distil that average into the model.",
    "lazy": "Pool selected patches instead of CLS, and judge with boxes or masks of your own task.",
}


@dataclass(frozen=True)
class Advice:
    """Short paragraphs: what it means, and what to do next."""

    meaning: list[str]
    next_steps: list[str]


def advise(entry: ModelEntry) -> Advice:
    """What the verdict means, and what to do about it; a paragraph for each kind that was found."""
    if not entry.kinds:
        return (
            _clean(entry) if entry.verdict == "clean" else Advice([], ["Look at the pictures and the numbers below."])
        )
    meaning = {kind: _MEANING[kind] for kind in entry.kinds if kind in _MEANING}
    if "high-norm" in meaning:
        meaning["high-norm"] += _where(entry)
    next_steps = [_NEXT[kind] for kind in entry.kinds if kind in _NEXT]
    if entry.planted is not None:
        next_steps.insert(0, "Nothing, since this was planted. With a real model that looks like this:")
    return Advice(list(meaning.values()), next_steps)


def _where(entry: ModelEntry) -> str:
    said = ""
    last = last_outlier_block(entry)
    if entry.place == "fixed":
        said += " Here they are tied to places of the grid, which points at the position table."
    if entry.onset_block is not None and last is not None and last < len(entry.curves.share) - 1:
        said += f" The final features have none: only those taken {block_range(entry.onset_block, last)} do."
    return said


def _clean(entry: ModelEntry) -> Advice:
    meaning = [
        "Nothing to repair among the things that were looked for. That is no promise about a task: measure the task."
    ]
    if entry.num_register_tokens:
        used = entry.number("registers", "effective_number")
        said = f"Its {count(entry.num_register_tokens, 'register')} were measured, not assumed to help"
        meaning.append(said + ("." if used is None else f": {figure(used)} of them are effectively in use."))
    unknown = [check.title.lower() for check in checks(entry) if check.state == "unknown"]
    next_step = "To look closer, give more images of the kind you care about."
    if unknown:
        next_step += f" Not looked at here: {', '.join(unknown)}; the list says what each needs."
    return Advice(meaning, [next_step])
