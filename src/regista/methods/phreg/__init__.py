"""PH-Reg: registers for a pretrained ViT by self-distillation from its denoised features (arXiv 2505.21501)."""

from __future__ import annotations

from regista.layers.shifted_views import sample_views
from regista.methods.phreg.denoising import Denoised, denoise, denoise_with_statistics

__all__ = ["Denoised", "denoise", "denoise_with_statistics", "sample_views"]
