"""The filter along channels against the complex path of the released code and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from regista.layers.channel_filter import low_pass, low_pass_gains
from tests.layers.shipped_pool import shipped_filter, shipped_kernel


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def test_shipped_kernel_is_one_frequency_off() -> None:
    assert len(shipped_kernel(768)) == 768
    assert int(shipped_kernel(768).argmax()) == 383
    assert int(shipped_kernel(769).argmax()) == 384


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 7, 16, 33, 384, 768, 769, 1024])
def test_equals_the_complex_path(width: int) -> None:
    x = noise(5, width)
    assert float((low_pass(x) - shipped_filter(x)).abs().max()) < 1e-14
    single = x.float()
    assert float((low_pass(single) - shipped_filter(single)).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("width", "wanted"), [(768, math.exp(-1 / 1536)), (384, 0.998699), (1024, 0.999512), (769, 1.0), (7, 1.0)]
)
def test_gain_of_a_constant(width: int, wanted: float) -> None:
    assert float(low_pass_gains(width)[0]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("width", [8, 768])
def test_closed_form_of_the_gains(width: int) -> None:
    def shipped(f: int) -> float:
        return math.exp(-((f + 1) ** 2) / (2 * width))

    gains = low_pass_gains(width)
    assert len(gains) == width // 2 + 1
    for f in range(width // 2):
        assert float(gains[f]) == pytest.approx((shipped(f) + shipped(-f)) / 2, abs=1e-15)
    assert float(gains[-1]) == pytest.approx(shipped(-width // 2), abs=1e-15)


def test_is_a_circular_convolution_along_channels() -> None:
    width = 768
    taps = low_pass(torch.eye(width, dtype=torch.float64))  # row i: the response to channel i
    first = taps[0]
    circulant = torch.stack([first.roll(shift) for shift in range(width)])
    assert float((taps - circulant).abs().max()) < 1e-15
    assert float((circulant - circulant.T).abs().max()) < 1e-15
    assert float(first.sum()) == pytest.approx(math.exp(-1 / (2 * width)), abs=1e-14)
    assert float(first[0]) == pytest.approx(0.09045, abs=1e-5)
    spread = width**0.5 / (2 * math.pi)
    for n in range(30):
        bell = math.exp(-(n**2) / (2 * spread**2)) * math.cos(2 * math.pi * n / width)
        assert float(first[n]) == pytest.approx(float(first[0]) * bell, abs=1e-12)
    x = noise(4, width)
    assert float((low_pass(x) - x @ circulant).abs().max()) < 2e-14


def test_keeps_a_sixteenth_of_white_noise() -> None:
    x = noise(2000, 768)
    kept = float(low_pass(x).square().mean() / x.square().mean())
    assert kept == pytest.approx(0.0639, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_filtered_in_float32(dtype: torch.dtype) -> None:
    x = noise(3, 64, dtype=dtype)
    assert low_pass(x).dtype == torch.float32
    assert torch.equal(low_pass(x), low_pass(x.float()))


def test_leaves_its_input_alone() -> None:
    x = noise(3, 64)
    kept = x.clone()
    low_pass(x)
    assert torch.equal(x, kept)
