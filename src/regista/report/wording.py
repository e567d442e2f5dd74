"""What a diagnosis means, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from regista.report.entry import ModelEntry
from regista.report.formatting import block_range, count, figure, percent, times

FEW_IMAGES = 10
MANY_OUTLIERS = 0.1
TITLES = {
    "high-norm": "Outlier norms",
    "attention-sink": "Attention sinks",
    "positional": "Positional residue",
    "inconsistent": "Inconsistent patches",
    "lazy": "Lazy aggregation",
}
_UNMEASURED = {
    "high-norm": "not measured",
    "attention-sink": "not measured: attention was switched off",
    "positional": "not measured: needs two images or more",
    "inconsistent": "not measured: add `--consistency`",
    "lazy": "not judged: needs objects to compare with (`--boxes` or `--masks`)",
}


@dataclass(frozen=True)
class Check:
    """One kind of artifact: ``state`` is "found", "absent" or "unknown"."""

    kind: str
    title: str
    state: str
    sentence: str


def verdict_word(entry: ModelEntry) -> str:
    """The verdict as a word: "Clean", "Artifacts", or what else the record says."""
    return entry.verdict.capitalize()


def claim(entry: ModelEntry) -> str:
    """The verdict as one sentence with its numbers, without the verdict's word."""
    if entry.kinds:
        first, *others = entry.kinds
        also = ", ".join(TITLES.get(kind, kind).lower() for kind in others)
        return _found(entry, first) + (f"; also: {also}" if also else "")
    if entry.verdict == "clean":
        measured = sum(check.state != "unknown" for check in checks(entry))
        images = count(entry.image_count, "image")
        if not measured:
            return f"nothing was found in {images}, but nothing was measured either"
        if measured == 1:
            return f"the one kind of artifact that was looked for was not found in {images}"
        return f"none of the {measured} kinds of artifact that were looked for was found in {images}"
    return "see the numbers below"


def checks(entry: ModelEntry) -> list[Check]:
    """Every kind of artifact, whether it was found, and the number behind that."""
    found = []
    for kind in [*TITLES, *(kind for kind in entry.kinds if kind not in TITLES)]:
        measured = entry.measures.get(kind.replace("-", "_")) is not None
        if kind in entry.kinds:
            state, sentence = "found", _found(entry, kind)
        elif measured:
            state, sentence = "absent", _absent(entry, kind)
        else:
            state, sentence = "unknown", _UNMEASURED.get(kind, "not measured")
        found.append(Check(kind, TITLES.get(kind, kind), state, sentence[0].upper() + sentence[1:] + "."))
    return found


def _found(entry: ModelEntry, kind: str) -> str:
    if kind == "high-norm":
        sentence = f"{percent(entry.share)} of patch tokens have outlier norms"
        if entry.ratio is not None:
            last = entry.depth is None or entry.outlier_block in (None, entry.depth - 1)
            sentence += f" ({times(entry.ratio)} the median{'' if last else f' at block {entry.outlier_block}'})"
        sentence += outlier_blocks(entry)
        place = {"moving": "they move with the image", "fixed": "they sit at the same places in every image"}
        return sentence + (f"; {place[entry.place]}" if entry.place in place else "")
    if kind == "attention-sink":
        block = entry.number("attention_sink", "block")
        sentence = f"{percent(entry.number('attention_sink', 'share'))} of patch tokens draw "
        sentence += f"{percent(entry.number('attention_sink', 'mass'))} of all attention"
        return sentence + ("" if block is None else f" (block {block:.0f})")
    if kind == "positional":
        return f"{_positional(entry)}: the features speak more of the place than of the picture"
    if kind == "inconsistent":
        share = entry.number("inconsistent", "share")
        return f"{percent(share)} of patch features change when the image is shifted by a few patches"
    if kind == "lazy":
        return f"{_hits(entry)}: the image vector is made from the background"
    return "found"


def _absent(entry: ModelEntry, kind: str) -> str:
    if kind == "high-norm":
        last = [curve[-1] if curve else None for curve in (entry.curves.largest, entry.curves.median)]
        if last[0] is None or not last[1]:
            return "no second mode of norms in any block"
        return f"no second mode of norms; in the last block the largest is {times(last[0] / last[1])} the median"
    if kind == "attention-sink":
        share, mass = entry.number("attention_sink", "share"), entry.number("attention_sink", "mass")
        if not share:
            return "no group of patches stands out by the attention it draws"
        return f"{percent(share)} of patches stand out, but they draw only {percent(mass)} of the attention"
    if kind == "positional":
        return _positional(entry)
    if kind == "inconsistent":
        cosine = entry.number("inconsistent", "median_cosine")
        return f"no patch stands apart when the image is shifted (median cosine {figure(cosine)})"
    if kind == "lazy":
        return _hits(entry)
    return "not found"


def _positional(entry: ModelEntry) -> str:
    share = entry.number("positional", "variance_explained")
    return f"position alone explains {percent(share)} of the variance of the final patch features"


def _hits(entry: ModelEntry) -> str:
    ratio, chance = entry.number("lazy", "hit_ratio"), entry.number("lazy", "chance")
    return (
        f"the patch closest to the image vector lies on an object in {percent(ratio)} of images "
        f"(a random patch: {percent(chance)})"
    )


def outlier_blocks(entry: ModelEntry) -> str:
    """Where the outliers are, with a space before it: " from block 4 on", " from block 4 to 9", or ""."""
    if entry.onset_block is None:
        return ""
    last = last_outlier_block(entry)
    if last is None or last == len(entry.curves.share) - 1:
        return f" from block {entry.onset_block} on"
    return f" {block_range(entry.onset_block, last)}, not after"


def last_outlier_block(entry: ModelEntry) -> int | None:
    """The last block after the onset that still has a tenth of the outliers; None if the record has no shares."""
    if entry.onset_block is None or not entry.share or len(entry.curves.share) <= entry.onset_block:
        return None
    least = 0.1 * entry.share
    return max(
        block for block, share in enumerate(entry.curves.share) if block == entry.onset_block or (share or 0) >= least
    )


def planted_sentence(entry: ModelEntry) -> str:
    """What was planted and how much of it was found; "" for an ordinary model."""
    planted = entry.planted
    if planted is None:
        return ""
    where = {"content": "on patches of little content", "position": "at fixed places of the grid"}.get(planted.kind, "")
    sentence = "Planted model: its artifacts were put into the weights on purpose"
    sentence += f" ({where})" if where else ""
    sentence += "" if planted.block is None else f", at block {planted.block}"
    if planted.precision is None and planted.recall is None:
        return sentence + "."
    sentence += f". Of what was found {percent(planted.precision)} was planted (precision), "
    return sentence + f"and of what was planted {percent(planted.recall)} was found (recall)."


def cautions(entry: ModelEntry, *, cutoff_by_hand: bool = False) -> list[str]:
    """What limits the verdict, a sentence each."""
    found = []
    if entry.share is not None and entry.share > MANY_OUTLIERS:
        found.append(
            f"{percent(entry.share)} of the patches are flagged, more than a tenth: that many are rarely outliers. "
            "Look at the maps before you believe it."
        )
    if cutoff_by_hand:
        found.append("The cutoff was set by hand, not found in the norms.")
    if entry.image_count == 1:
        found.append(
            "One image only: fixed and moving outliers cannot be told apart; a verdict about a model needs dozens."
        )
    elif entry.image_count < FEW_IMAGES:
        found.append(f"Only {entry.image_count} images: use a few dozen of the kind you care about for a verdict.")
    if entry.skipped:
        found.append(f"{count(len(entry.skipped), 'image')} could not be used: {skipped_list(entry)}.")
    return found


def skipped_list(entry: ModelEntry, most: int = 8) -> str:
    """Names and reasons of images that were left out."""
    named = [f"{name} ({reason})" for name, reason in entry.skipped[:most]]
    rest = len(entry.skipped) - len(named)
    return "; ".join(named) + (f"; and {rest} more" if rest > 0 else "")
