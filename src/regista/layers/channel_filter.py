"""A low-pass filter along the channels of a token: the stability of LAST-ViT (arXiv 2602.22394, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def low_pass(x: Tensor) -> Tensor:
    """The filter of the paper along the last dimension: (..., D) -> (..., D), float32 at least, no gradient.

    A circular convolution along the channels: a Gaussian of standard deviation sqrt(D) / (2 pi)
    channels, for D = 768 a blur over about ten channels on either side.
    """
    values = at_least_float32(x)
    width = values.shape[-1]
    spectrum = torch.fft.rfft(values)
    gains = low_pass_gains(width).to(values.device, values.dtype)
    # Real and imaginary part alike; a broadcast gain would take three times as long.
    torch.view_as_real(spectrum).mul_(torch.stack([gains, gains], -1))
    filtered: Tensor = torch.fft.irfft(spectrum, n=width)
    return filtered


def low_pass_gains(width: int) -> Tensor:
    """Gains of the real spectrum of ``width`` channels: (D // 2 + 1,) float64.

    The released filter multiplies the shifted complex spectrum by a Gaussian of standard
    deviation sqrt(D) at the positions -D/2 + 1 .. D/2 and keeps the real part. For even D the
    Gaussian lies one frequency off, at exp(-(f + 1)^2 / 2D); the real part averages the gains of
    f and -f, which is exp(-(f^2 + 1) / 2D) cosh(f / D), with exp(-1 / 2D) at frequency 0.
    The highest frequency D / 2 has no partner and keeps exp(-(D/2 - 1)^2 / 2D). For odd D the
    Gaussian is centred: exp(-f^2 / 2D), with 1 at frequency 0.
    """
    frequencies = torch.arange(width // 2 + 1, dtype=torch.float64)
    if width % 2:
        return torch.exp(-frequencies.square() / (2 * width))
    gains = torch.exp(-(frequencies.square() + 1) / (2 * width)) * torch.cosh(frequencies / width)
    highest = torch.exp(-(frequencies - 1).square() / (2 * width))
    return torch.where(frequencies == width // 2, highest, gains)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision made float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
