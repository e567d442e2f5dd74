"""Settings of PH-Reg."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Optional

from regista.methods.phreg.student import parts_of

MOST_HELD_OUT = 0.5
DENOISING = ("mode", "num_views", "shift_ratio", "seed")  # what mode "denoise" has a use for


@dataclass(frozen=True)
class PhregConfig:
    """Settings of ``phreg``. Defaults are those of the paper (2505.21501) and its released DINOv2 run.

    Attributes:
        mode: "distil" trains a student with registers; "denoise" only averages views at inference.
        registers: How many are added.
        num_views, shift_ratio: Of the denoised target; 1 view is the teacher's raw features.
        unfrozen: "paper" (registers, positions, patch embedding, last attention) or "released" (the whole
            last block instead; the last two for CLIP), or parts by name: see ``regista.methods.phreg.student``.
        read_out: "normed" patch tokens of teacher and student; "clip-released": NACLIP features of the
            teacher, a student with MaskCLIP's last block, both projected (CLIP only).
        targets: "stored" computes them once and keeps them on disk; "fresh" denoises anew at every step.
        image_size: Side of the square crops in pixels; the model's own if None.
        max_aspect: Longest side of a stored target, in short sides. 1 stores centre squares, so that the teacher
            sees square images as in the paper; more lets crops move along the long side, over a rectangle for
            which the teacher's positions are resized.
        flip: Mirror half of the crops of stored targets; the released student sees no flips.
        epochs, batch_size: Of the student. The published DINOv2 numbers are from epoch 30 of a run of 100.
        lr, end_lr: Learning rate at the first and last epoch, falling exponentially; 1e-4 and 5e-6 in the paper.
            ``lr`` None: the best of ``lr_candidates`` on held-out images. ``end_lr`` None: a twentieth of ``lr``.
        lr_candidates, lr_epochs: Tried for that, each for so many epochs.
        weight_decay, mse_scale: Of the loss.
        held_out: Share of the images that is not trained on, at most a half.
        precision: "auto", "fp32" or "bf16".
        num_workers: Processes that load data.
        keep_targets: Leave stored targets in the work folder.
        seed: Of registers, views, crops and order.
    """

    mode: Literal["distil", "denoise"] = "distil"
    registers: int = 16
    num_views: int = 10
    shift_ratio: float = 0.15
    unfrozen: str = "paper"
    read_out: Literal["normed", "clip-released"] = "normed"
    targets: Literal["stored", "fresh"] = "stored"
    image_size: Optional[int] = None  # noqa: UP045
    max_aspect: float = 1.0
    flip: bool = False
    epochs: int = 30
    batch_size: int = 8
    lr: Optional[float] = None  # noqa: UP045
    end_lr: Optional[float] = None  # noqa: UP045
    lr_candidates: tuple[float, ...] = (5e-5, 1e-4)
    lr_epochs: int = 3
    weight_decay: float = 1e-2
    mse_scale: float = 1.0
    held_out: float = 0.1
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    num_workers: int = 0
    keep_targets: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.registers < 0:
            raise ValueError(f"registers is a number of tokens, 0 or more, got {self.registers}")
        for name in ("num_views", "epochs", "batch_size", "lr_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("num_workers", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 or more, got {getattr(self, name)}")
        if not 0 <= self.shift_ratio < 1:
            raise ValueError(f"shift_ratio is in [0, 1), got {self.shift_ratio}")
        if not 0 < self.held_out <= MOST_HELD_OUT:
            raise ValueError(
                f"held_out is a share above 0 and at most {MOST_HELD_OUT}, or little is left to train on, got "
                f"{self.held_out}"
            )
        parts_of(self.unfrozen, clip=False)
        rates = (*self.lr_candidates, *(rate for rate in (self.lr, self.end_lr) if rate is not None))
        if not self.lr_candidates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"learning rates are positive and lr_candidates not empty, got {rates}")
        if self.end_lr is not None and (self.lr is None or self.end_lr > self.lr):
            raise ValueError(f"end_lr goes with a larger lr, got end_lr {self.end_lr} and lr {self.lr}")
        for name in ("weight_decay", "mse_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is 0 or more, got {getattr(self, name)}")

    @property
    def lowest_lr(self) -> float:
        """The share of ``lr`` at the end: 1/20, as from 1e-4 to 5e-6."""
        return 1 / 20
