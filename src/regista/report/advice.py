"""What a finding means for someone who uses the model, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from regista.report.entry import ModelEntry
from regista.report.formatting import block_range, count, figure
from regista.report.wording import TITLES, checks, last_outlier_block

_MEANING = {
    "high-norm": (
        "A few patch tokens no longer describe their patch: the model keeps notes about the whole image there. "
        "Work on single patches suffers (segmentation, attention maps, finding objects, matching); "
        "classification from CLS often does not."
    ),
    "attention-sink": (
        "Attention pours into a few patches whatever they show, so an attention map is no evidence of what matters there."
    ),
    "positional": (
        "Patches at the same place look alike in unlike images. Clustering and matching of patches find places, not things."
    ),
    "inconsistent": (
        "Some features depend on where the patch grid happens to lie. Such artifacts need not have high norms, and cutoffs miss them."
    ),
    "lazy": (
        "The image vector leans on background patches. Zero-shot maps and attention from it point at the wrong places."
    ),
}
_NEXT = {
    "high-norm": (
        "Use a checkpoint that was trained with registers, or repair this one: registers added at test time need no training, "
        "self-distilled registers need images without labels. `regista --help` lists what this version can do. "
        "Then diagnose the result on the same images and compare."
    ),
    "attention-sink": "Read patch features instead of attention maps, or attention of an earlier block.",
    "positional": "Subtract the mean feature of each place before clustering or matching, and check with more unlike images.",
    "inconsistent": "Average the features over a few shifted views of the image, or distil that average into the model.",
    "lazy": "Pool selected patches instead of CLS, and judge with boxes or masks of your own task.",
}


@dataclass(frozen=True)
class Advice:
    """Two short paragraphs, a sentence or more each."""

    meaning: str
    next_step: str


def advice(entry: ModelEntry) -> Advice:
    """What the verdict means, and what to do about it."""
    if not entry.kinds:
        return _clean(entry) if entry.verdict == "clean" else Advice("", "Look at the pictures and the numbers below.")
    meaning = [_MEANING[kind] for kind in entry.kinds if kind in _MEANING]
    if "high-norm" in entry.kinds:
        meaning[1:1] = _where(entry)
    next_step = [_NEXT[kind] for kind in entry.kinds if kind in _NEXT]
    if entry.planted is not None:
        next_step.insert(0, "Nothing needs to be done about a planted model; of a real one with this result:")
    return Advice(" ".join(meaning), " ".join(next_step))


def _where(entry: ModelEntry) -> list[str]:
    found = []
    last = last_outlier_block(entry)
    if entry.place == "fixed":
        found.append("Here they are tied to places of the grid, which points at the position table.")
    if entry.onset_block is not None and last is not None and last < len(entry.curves.share) - 1:
        found.append(f"The final features have none: only those taken {block_range(entry.onset_block, last)} do.")
    return found


def _clean(entry: ModelEntry) -> Advice:
    meaning = "Nothing to repair among the things that were looked for. That is no promise about a task: measure the task."
    if entry.num_register_tokens:
        used = entry.number("registers", "effective_number")
        meaning += f" Its {count(entry.num_register_tokens, 'register')} were measured, not assumed to help"
        meaning += "." if used is None else f": {figure(used)} of them are effectively in use."
    unknown = [TITLES[check.kind].lower() for check in checks(entry) if check.state == "unknown"]
    next_step = "To look closer, give more images of the kind you care about"
    next_step += f". Not looked at here: {', '.join(unknown)}; the list above says what each needs." if unknown else "."
    return Advice(meaning, next_step)
