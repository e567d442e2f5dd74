"""Training that knows no method: a loop on accelerate, schedules, checkpoints that resume exactly."""

from __future__ import annotations

from regista.train.config import TrainConfig
from regista.train.loop import train
from regista.train.outcome import TrainResult
from regista.train.sampling import SeededDataset, item_generator
from regista.train.task import TrainingTask

__all__ = ["SeededDataset", "TrainConfig", "TrainResult", "TrainingTask", "item_generator", "train"]
