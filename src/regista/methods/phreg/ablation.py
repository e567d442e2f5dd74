"""What each part of PH-Reg brings: the paper's ablation and sweeps, arm by arm, on the same held-out images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.weights import weights_hash
from regista.data.images import files_digest
from regista.diagnosis.known_outliers import OutlierRule, outlier_rule
from regista.methods.phreg.config import PhregConfig
from regista.methods.phreg.denoising import denoise
from regista.methods.phreg.distilling import split
from regista.methods.phreg.method import Phreg, image_files
from regista.methods.protocol import Progress, State, Workspace
from regista.methods.settings import plain_config
from regista.results.record import differences
from regista.results.writing import write_whole

REGISTERS = (0, 1, 4, 16)
VIEWS = (1, 2, 5, 10, 20)
SHIFTS = (0.05, 0.1, 0.15, 0.25)
UNFROZEN = ("registers", "registers,positions", "paper", "released")
RESULT = "result.json"
JUDGED_BY = ("held_out", "seed", "image_size", "num_views", "shift_ratio")  # of the full arm


@dataclass(frozen=True)
class Arm:
    """One line of the table.

    Attributes:
        name: Also that of its folder.
        config: Settings; None is the teacher itself.
    """

    name: str
    config: PhregConfig | None


def arms_of(what: str, config: PhregConfig) -> list[Arm]:
    """The arms of a study.

    Args:
        what: "ablation" (table of 2505.21501: denoise only, distil without both, with registers, with
            denoising, full), or the sweeps "registers", "views", "shift", "unfrozen".
        config: Settings of the full arm.

    Raises:
        ValueError: for another study.
    """
    full = replace(config, mode="distil")
    studies: dict[str, list[Arm]] = {
        "ablation": [
            Arm("denoise-only", replace(config, mode="denoise")),
            Arm("distil", replace(full, registers=0, num_views=1)),
            Arm("distil-registers", replace(full, num_views=1)),
            Arm("distil-denoise", replace(full, registers=0)),
            Arm("full", full),
        ],
        "registers": [Arm(f"registers-{count}", replace(full, registers=count)) for count in REGISTERS],
        "views": [Arm(f"views-{count}", replace(full, num_views=count)) for count in VIEWS],
        "shift": [Arm(f"shift-{ratio:g}", replace(full, shift_ratio=ratio)) for ratio in SHIFTS],
        "unfrozen": [Arm(f"unfrozen-{parts.replace(',', '+')}", replace(full, unfrozen=parts)) for parts in UNFROZEN],
    }
    if what not in studies:
        raise ValueError(f"unknown study {what!r}; one of {', '.join(studies)}")
    return [Arm("teacher", None), *studies[what]]


def run_study(
    teacher: Backbone,
    images: Any,
    what: str,
    config: PhregConfig,
    folder: Path,
    *,
    reference: Backbone | None = None,
    progress: Progress | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """All arms of a study, one after the other; what is done already, by this study or another, is not done again.

    Args:
        images: Files, folders or patterns.
        config: Of the full arm: it decides which images are held out and the target all arms are compared with.
        folder: A folder for each arm is made in it.
        reference: A healthy model of the same width to compare with, such as the one before planting.
        on_row: Called with each row when its arm is done.

    Returns:
        Rows of the table: see ``measured``.

    Raises:
        ValueError: for an unknown study, too few images, arms in the folder that are of another model, other
            images or settings, and what the method itself refuses.
    """
    arms = arms_of(what, config)
    paths = image_files(images)
    split(range(len(paths)), config.held_out, config.seed)
    material = {
        "teacher": weights_hash(teacher.module),
        "reference": reference and weights_hash(reference.module),
        "images": files_digest(paths),
        "judged": {name: getattr(config, name) for name in JUDGED_BY},
    }
    rows = []
    for arm in arms:
        row = _done(folder, arm, material)
        if row is None:
            row = _run_arm(teacher, paths, arm, config, folder, material, reference, progress)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    return rows


def _run_arm(
    teacher: Backbone,
    paths: Sequence[Path],
    arm: Arm,
    config: PhregConfig,
    folder: Path,
    material: dict[str, Any],
    reference: Backbone | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Train one arm and measure it on the held-out images."""
    model, state = teacher, State()
    if arm.config is not None:
        method = Phreg(arm.config)
        work = Workspace(folder / arm.name, resume=True)
        state = method.fit(teacher, list(paths), progress=progress, workspace=work)
        model = method.apply(teacher, state)
    held = [paths[index] for index in split(range(len(paths)), config.held_out, config.seed)[1]]
    row = {
        "arm": arm.name,
        **measured(model, teacher, held, config, reference),
        "config": _plain(arm),
        "state": state.record,
        "material": material,
    }
    done = folder / arm.name / RESULT
    done.parent.mkdir(parents=True, exist_ok=True)

    def write(partial: Path) -> None:
        partial.write_text(json.dumps(row, indent=1), encoding="utf-8")

    write_whole(done, write)
    return row


def _done(folder: Path, arm: Arm, material: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an arm that is finished, under this name or in another study."""
    wanted = json.loads(json.dumps({"config": _plain(arm), "material": material}))
    for path in [folder / arm.name / RESULT, *sorted(folder.glob(f"*/{RESULT}"))]:
        if not path.is_file():
            continue
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(row.get(name) == value for name, value in wanted.items()):
            return {**row, "arm": arm.name}
        if row.get("material") != wanted["material"] or row["arm"] == arm.name:
            differing = "; ".join(differences(row, wanted))
            raise ValueError(f"{path.parent} was run otherwise ({differing}); take another folder")
    return None


def _plain(arm: Arm) -> dict[str, Any]:
    return {} if arm.config is None else plain_config(arm.config)


@torch.no_grad()
def measured(
    model: Backbone, teacher: Backbone, held: Sequence[Path], config: PhregConfig, reference: Backbone | None
) -> dict[str, Any]:
    """Of one model on held-out images: share of outliers by the teacher's rule, and cosines.

    "target": to the denoised features of the teacher; "others_raw": of the teacher's healthy cells to
    its raw features; "outliers_reference", "others_reference": to the reference model's features.
    """
    side = config.image_size or min(teacher.image_size)
    pixels = teacher.preprocess(list(held), image_size=(side, side), policy="crop")
    rule = _rule(teacher, pixels)
    sums = _Means()
    for batch in torch.split(pixels, config.batch_size):
        patches, raw = model(batch).patches, teacher(batch).patches
        views = torch.Generator().manual_seed(config.seed)
        target = denoise(teacher, batch, num_views=config.num_views, shift_ratio=config.shift_ratio, generator=views)
        sick = torch.zeros(patches.shape[:2], dtype=torch.bool) if rule is None else rule.mask(teacher, batch).cpu()
        sums.add("target", _cosine(patches, target))
        sums.add("others_raw", _cosine(patches, raw)[~sick])
        if rule is not None:
            sums.add("outlier_share", rule.mask(model, batch).float().cpu())
        if reference is not None:
            close = _cosine(patches, reference(batch).patches)
            sums.add("outliers_reference", close[sick])
            sums.add("others_reference", close[~sick])
    return {"images": len(pixels), **sums.means()}


class _Means:
    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor) -> None:
        self.found.setdefault(name, []).append(values.flatten().float().cpu())

    def means(self) -> dict[str, float]:
        joined = {name: torch.cat(values) for name, values in self.found.items()}
        return {name: round(float(values.mean()), 6) for name, values in joined.items() if len(values)}


def _rule(teacher: Backbone, pixels: Tensor) -> OutlierRule | None:
    try:
        return outlier_rule(teacher, pixels)
    except ValueError:
        return None


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.float(), b.to(a.device).float(), dim=-1).cpu()
