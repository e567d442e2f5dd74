"""Where a run computes, and how precisely."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin

from regista.train.config import TrainConfig

_DISTRIBUTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The machine as accelerate sees it: one process, or those of ``accelerate launch`` and ``torchrun``.

    Precision and accumulation are this package's own: what the launcher's file says of them does
    not count, the run's settings do.

    Raises:
        ValueError: for a device that is not there, or a launcher that splits the model itself.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(config.device, True):
        raise ValueError(f"device {config.device!r} is asked for, and this machine has none; use 'auto' or 'cpu'")
    cpu = config.device == "cpu"
    _forget_other_settings(on_cpu=cpu or not any(there.values()))
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=config.find_unused_parameters)],
    )
    if accelerator.distributed_type not in _DISTRIBUTED:
        raise ValueError(
            f"{accelerator.distributed_type.value} is not supported; launch one process a device "
            "(accelerate launch --multi_gpu, or torchrun)"
        )
    return accelerator


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Whether "auto", "fp32" or "bf16" means bfloat16 autocast here: "auto" where CUDA has it natively."""
    if precision != "auto":
        return precision == "bf16"
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return bool(torch.cuda.is_bf16_supported())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _forget_other_settings(*, on_cpu: bool) -> None:
    """Accelerate keeps its first settings for the life of the process; let one process change them."""
    if not PartialState._shared_state:
        return
    state = PartialState()
    precision = AcceleratorState._shared_state.get("_mixed_precision", "no")
    if state.num_processes == 1 and ((state.device.type == "cpu") != on_cpu or precision != "no"):
        AcceleratorState._reset_state(reset_partial_state=True)
