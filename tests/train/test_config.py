"""Settings that cannot work are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from regista.train import TrainConfig


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs .* 1 or more, got 0"),
        ({"epochs": 1.5}, "epochs"),
        ({"batch_size": True}, "batch_size"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"seed": -1}, "seed"),
        ({"num_workers": -2}, "num_workers"),
        ({"keep": 0}, "keep"),
        ({"max_steps": 0}, "max_steps"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": math.nan}, "lr .* got nan"),
        ({"lr": "1e-4"}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clip_grad_norm": 0}, "clip_grad_norm"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"optimizer": "lion"}, "adamw, sgd, got 'lion'"),
        ({"schedule": "step"}, "constant, linear"),
        ({"precision": "fp16"}, "auto, fp32, bf16"),
        ({"device": "tpu"}, "device"),
        ({"shuffle": 1}, "shuffle"),
        ({"schedule": "cosine", "end_lr": 1.0}, "end_lr 1.0 is above"),
        ({"warmup_epochs": 2.0}, "warmup_epochs 2.0 is longer"),
        ({"schedule": "exponential-epochs"}, "end_lr above 0"),
        ({"schedule": "exponential-epochs", "end_lr": 1e-6, "warmup_epochs": 1.0}, "no warm-up"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**changes)


def test_what_decides_the_weights() -> None:
    base = TrainConfig()
    same = TrainConfig(num_workers=3, keep=None, max_steps=7, log_every=5, device="cpu", checkpoint_every_steps=2)
    assert base.decisive() == same.decisive()
    for change in ({"lr": 1e-3}, {"batch_size": 4}, {"seed": 1}, {"schedule": "linear"}, {"betas": [0.8, 0.9]}):
        assert base.decisive() != TrainConfig(**change).decisive()  # type: ignore[arg-type]
