"""PH-Reg: registers for a pretrained ViT by self-distillation from its denoised features (arXiv 2505.21501)."""

from __future__ import annotations

from regista.layers.shifted_views import sample_views
from regista.methods.phreg.computing import compute_targets
from regista.methods.phreg.crops import CropDataset
from regista.methods.phreg.denoising import Denoised, denoise, denoise_with_statistics
from regista.methods.phreg.target_settings import TargetSettings
from regista.methods.phreg.targets import TargetStore, check_space, disk_cost

__all__ = [
    "CropDataset",
    "Denoised",
    "TargetSettings",
    "TargetStore",
    "check_space",
    "compute_targets",
    "denoise",
    "denoise_with_statistics",
    "disk_cost",
    "sample_views",
]
