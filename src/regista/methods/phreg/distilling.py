"""Training the student: data, rates, held-out numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from regista.backbones.base import Backbone
from regista.data.skipping import tell_skipped
from regista.diagnosis.known_outliers import OutlierRule, outlier_rule
from regista.methods.phreg.computing import compute_targets, image_views
from regista.methods.phreg.config import PhregConfig
from regista.methods.phreg.crops import CropDataset
from regista.methods.phreg.denoising import ReadOut, denoise
from regista.methods.phreg.student import make_student, parts_of, trained_parameters
from regista.methods.protocol import Progress
from regista.objectives.distil import DistilTask, normed_patches
from regista.results.writing import write_whole
from regista.train.config import TrainConfig
from regista.train.loop import train
from regista.train.sampling import SeededDataset

JUDGED = 64  # held-out images at most


@dataclass(frozen=True)
class Material:
    """What a student is trained and judged on.

    Attributes:
        train, held_out: Crops and their targets, of different images.
        rule: Which tokens of the teacher are outliers; None if it has none on these images.
        side: Of the crops in pixels.
    """

    train: Dataset[Any]
    held_out: Dataset[Any]
    rule: OutlierRule | None
    side: int


def gather(
    teacher: Backbone,
    paths: Sequence[Path],
    config: PhregConfig,
    folder: Path,
    *,
    resume: bool,
    teacher_features: ReadOut | None,
    progress: Progress | None,
) -> Material:
    """Compute and store the targets, and split the images.

    Raises:
        ValueError: for fewer than two images, no room on the disk, or targets of another model.
    """
    if len(paths) < 2:
        raise ValueError(f"distillation wants at least two images, one of them to be held out, got {len(paths)}")
    store = compute_targets(
        teacher,
        paths,
        folder,
        num_views=config.num_views,
        shift_ratio=config.shift_ratio,
        seed=config.seed,
        image_size=config.image_size,
        max_aspect=config.max_aspect,
        features=teacher_features,
        readout="patches" if teacher_features is None else config.read_out,
        resume=resume,
        progress=None if progress is None else lambda done: progress("targets", done, len(paths)),
    )
    for path, reason in store.skipped:  # also what an earlier run found
        tell_skipped(path, reason)
    kept, held = split(store.indices(), config.held_out, config.seed)
    side = store.settings.geometry.image_size
    held_paths = [store.images[index].path for index in held]
    try:
        rule = outlier_rule(teacher, held_paths, image_size=(side, side))
    except ValueError:
        rule = None
    sets: list[Any] = [CropDataset(store, indices=kept, flip=config.flip)]
    sets.append(CropDataset(store, indices=held, central=True))
    if config.targets == "fresh":
        sets = [FreshCrops(crops) for crops in sets]
    train_set, held_set = sets
    return Material(train_set, held_set, rule, side)


def split(indices: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(to train on, held out): at random, at least one of each, at most 64 held out."""
    if len(indices) < 2:
        raise ValueError(f"only {len(indices)} image can be read; two are needed, one of them to be held out")
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(share * len(indices))), len(indices) - 1, JUDGED)
    shuffled = [indices[place] for place in order]
    return sorted(shuffled[count:]), sorted(shuffled[:count])


class FreshCrops(SeededDataset):
    """Crops without their stored targets, and the numbers from which new views are drawn."""

    def __init__(self, crops: Any) -> None:
        self.crops = crops

    def __len__(self) -> int:
        return len(self.crops)

    def item(self, index: int, *, epoch: int, seed: int) -> Tensor:
        """An image (3, R, R)."""
        pixels: Tensor = self.crops.item(index, epoch=epoch, seed=seed)[0]
        return pixels


def fresh_targets(teacher: Backbone, config: PhregConfig, features: ReadOut | None) -> Callable[[Tensor], Tensor]:
    """Denoised features of a batch, each image with views of its own that its pixels decide.

    So a run that goes on after a kill draws the same views as one that ran through.
    """

    def targets(images: Tensor) -> Tensor:
        grid = teacher.layout((images.shape[-2], images.shape[-1])).grid_size
        drawn = [
            image_views(config.seed, _fingerprint(image), grid, config.num_views, config.shift_ratio)
            for image in images
        ]
        offsets, flips = (torch.stack(list(part)) for part in zip(*drawn, strict=True))
        return denoise(teacher, images, views=(offsets, flips), features=features)

    return targets


def distil(
    teacher: Backbone,
    material: Material,
    config: PhregConfig,
    folder: Path,
    *,
    resume: bool,
    student_patches: Callable[[Backbone, Tensor], Tensor] | None,
    teacher_features: ReadOut | None,
    clip: bool,
    progress: Progress | None,
) -> tuple[Backbone, dict[str, Any], tuple[str, ...]]:
    """Choose the learning rate, train, and judge: (student, record, names of what was trained)."""
    parts = parts_of(config.unfrozen, clip=clip)

    def run(rate: float, epochs: int, where: Path, what: str) -> tuple[Backbone, dict[str, Any], tuple[str, ...]]:
        student = make_student(teacher, config.registers, config.seed)
        trained = trained_parameters(student, teacher, parts)
        task = DistilTask(
            student,
            trained,
            material.train,
            targets=fresh_targets(teacher, config, teacher_features) if config.targets == "fresh" else None,
            student_patches=student_patches or normed_patches,
            mse_scale=config.mse_scale,
            held_out=material.held_out,
            batch_size=config.batch_size,
            extra_metrics=outlier_metrics(student, material, config.batch_size),
            described={"registers": config.registers, "unfrozen": parts, "views": config.num_views},
        )
        before = task.evaluate(-1)
        result = train(
            task,
            train_config(config, rate, epochs),
            where,
            resume=resume and where.exists(),
            progress=None if progress is None else lambda done, of: progress(what, done, of),
        )
        record = {"lr": rate, "before": before, "after": result.metrics, "epochs": result.epochs, "steps": result.steps}
        return student, record, tuple(trained)

    rate, tried = _rate(config, run, folder)
    student, record, names = run(rate, config.epochs, folder / "student", "student")
    return student, {**record, "lr_tried": tried, "trained": _counted(student, names)}, names


def _rate(config: PhregConfig, run: Callable[..., Any], folder: Path) -> tuple[float, list[dict[str, float]]]:
    """The given rate, or the candidate with the lowest held-out loss after a few epochs."""
    if config.lr is not None:
        return config.lr, []
    tried: list[dict[str, float]] = []
    for candidate in config.lr_candidates:
        where = folder / f"lr-{candidate:g}"
        done = where / "result.json"
        if done.is_file():
            loss = float(json.loads(done.read_text(encoding="utf-8"))["loss"])
        else:
            _, record, _ = run(candidate, config.lr_epochs, where, f"lr {candidate:g}")
            loss = float(record["after"]["held_out_loss"])
            _write_json(done, {"lr": candidate, "loss": loss})
        tried.append({"lr": candidate, "held_out_loss": loss})
    best = min(tried, key=lambda one: one["held_out_loss"])
    return best["lr"], tried


def _write_json(path: Path, content: dict[str, float]) -> None:
    def write(partial: Path) -> None:
        partial.write_text(json.dumps(content), encoding="utf-8")

    write_whole(path, write)


def train_config(config: PhregConfig, rate: float, epochs: int) -> TrainConfig:
    """Settings of the training loop: AdamW, the rate falling exponentially epoch by epoch."""
    end = rate * config.lowest_lr if config.end_lr is None else config.end_lr
    return TrainConfig(
        epochs=epochs,
        batch_size=config.batch_size,
        lr=rate,
        end_lr=end,
        weight_decay=config.weight_decay,
        schedule="exponential-epochs",
        precision=config.precision,
        num_workers=config.num_workers,
        seed=config.seed,
    )


def outlier_metrics(
    student: Backbone, material: Material, batch_size: int
) -> Callable[[int], Mapping[str, float]] | None:
    """After each epoch, the share of held-out patches that the teacher's rule calls outliers."""
    rule = material.rule
    if rule is None:
        return None

    def measure(_epoch: int) -> Mapping[str, float]:
        shares: list[Tensor] = []
        for batch in DataLoader(material.held_out, batch_size=batch_size):
            images = batch if isinstance(batch, Tensor) else next(iter(batch))
            with torch.no_grad():
                shares.append(rule.mask(student, images.to(student.device)).float().mean(-1).cpu())
        return {"held_out_outlier_share": float(torch.cat(shares).mean())}

    return measure


def _fingerprint(image: Tensor) -> int:
    """A number that an image decides."""
    return int(image.detach().double().sum().abs().mul(1e6).remainder(2**31).item())


def _counted(student: Backbone, names: Sequence[str]) -> dict[str, int]:
    parameters = dict(student.module.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    return {"tensors": len(names), "parameters": sum(parameters[name].numel() for name in names), "of": total}
