"""PH-Reg: registers for a pretrained ViT, by self-distillation from its own denoised features."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from regista.backbones.base import Backbone
from regista.data.images import find_images, unique_files
from regista.methods.phreg.clip_patches import is_clip, read_outs
from regista.methods.phreg.config import DENOISING, PhregConfig
from regista.methods.phreg.denoised import DenoisedViews
from regista.methods.phreg.distilling import distil, gather
from regista.methods.phreg.student import first_registers, make_student, parts_of, trained_parameters
from regista.methods.protocol import Method, Progress, State, Workspace

DIVERGED = 0.5  # of the cosine to the targets before training


class Phreg(Method):
    """Self-distilled registers (2505.21501): a student with registers learns the denoised features of its teacher."""

    name = "phreg"
    summary = "registers for a pretrained model, by self-distillation from its own denoised features"
    config_class = PhregConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.needs_images = self.config.mode != "denoise"

    def unused(self, given: Collection[str]) -> list[str]:
        """Denoising has no student, so no setting of one."""
        return [name for name in given if name not in DENOISING] if self.config.mode == "denoise" else []

    def outline(self, backbone: Backbone) -> Backbone:
        """The student before its training."""
        config: PhregConfig = self.config
        if config.mode == "denoise":
            return self.apply(backbone, State())
        read_outs(backbone, config.read_out)
        student = make_student(backbone, config.registers, config.seed)
        trained_parameters(student, backbone, parts_of(config.unfrozen, clip=is_clip(backbone)))
        return student

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Denoise the images, train the student on them, judge it on those held out.

        Raises:
            ValueError: for images that are not files, fewer than two of them, or no room for the targets; if the
                student diverges.
        """
        config: PhregConfig = self.config
        if config.mode == "denoise":
            return State({"mode": "denoise", "num_views": config.num_views, "shift_ratio": config.shift_ratio})
        self.outline(backbone)
        paths = image_files(images)
        teacher_features, student_patches = read_outs(backbone, config.read_out)
        with ExitStack() as stack:
            folder, resume = _work(workspace, stack)
            material = gather(
                backbone,
                paths,
                config,
                folder / "targets",
                resume=resume,
                teacher_features=teacher_features,
                progress=progress,
            )
            student, record, names = distil(
                backbone,
                material,
                config,
                folder,
                resume=resume,
                student_patches=student_patches,
                teacher_features=teacher_features,
                clip=is_clip(backbone),
                progress=progress,
            )
            if not config.keep_targets:
                shutil.rmtree(folder / "targets", ignore_errors=True)
        state = student.module.state_dict()
        record |= {"mode": "distil", "images": len(paths), "outliers": material.rule and material.rule.to_dict()}
        tensors = {name: state[name].detach().cpu().clone() for name in names}
        return State(record, tensors, what_training_did(record["before"], record["after"]))

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """The student: registers inserted, trained tensors put in their places."""
        config: PhregConfig = self.config
        if config.mode == "denoise":
            denoised = copy.deepcopy(backbone)
            denoised.add(DenoisedViews(config.num_views, config.shift_ratio, config.seed))
            return denoised
        student = backbone.with_registers(first_registers(config.registers, backbone.embed_dim, config.seed))
        own = student.module.state_dict()
        with torch.no_grad():
            for name, value in state.tensors.items():
                own[name].copy_(value)
        return student


def what_training_did(before: dict[str, float], after: dict[str, float]) -> tuple[str, ...]:
    """A note if the student is no better on held-out images than it was before its training.

    Raises:
        ValueError: if it has diverged: half of its cosine to the targets is lost.
    """
    was, now = before["held_out_cosine"], after["held_out_cosine"]
    if not now >= DIVERGED * was:
        raise ValueError(
            f"the student has diverged: on held-out images its cosine to the denoised target fell from {was:.3f} to "
            f"{now:.3f}; nothing is kept of it, train with a lower lr"
        )
    if after["held_out_loss"] <= before["held_out_loss"]:
        return ()
    return (
        (
            f"training made the student worse on held-out images: loss {before['held_out_loss']:.4g} -> "
            f"{after['held_out_loss']:.4g}, cosine to the denoised target {was:.3f} -> {now:.3f}; try a lower lr, "
            "more epochs or more images"
        ),
    )


def image_files(images: Any) -> list[Path]:
    """Paths out of what was given; a file that is named twice comes once, or it could be trained on and held out.

    Raises:
        ValueError: for tensors and live images, which cannot be read again.
    """
    given = [images] if isinstance(images, (str, Path)) else list(images)
    if not given or not all(isinstance(image, (str, Path)) for image in given):
        raise ValueError("phreg reads its images again and again: give files, folders or patterns, no tensors")
    return unique_files(find_images(given))


def _work(workspace: Workspace | None, stack: ExitStack) -> tuple[Path, bool]:
    if workspace is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regista-phreg-"))), False
    workspace.folder.mkdir(parents=True, exist_ok=True)
    return workspace.folder, workspace.resume


METHOD = Phreg
