"""Speed of selective pooling against the released path, side by side in one process.

Run: python benchmarks/selective_pool_speed.py [--repeats 61] [--threads 1] [--device cpu] [--out FILE.json]

The released path filters through the complex spectrum with both shifts and takes ``topk``; ours
takes the real spectrum with one gain a frequency, and the maximum where K is 1. Tokens are
(8, 196, 768) float32. Each repeat runs all sides in turn; a ratio is the median over the
repeats of released / ours, so above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from regista.layers.channel_filter import low_pass
from regista.layers.selective_pool import SelectivePool

SHAPE = (8, 196, 768)
COUNTS = (1, 7, 49, 98)


def main() -> None:
    """Measure, print and, if asked, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {"threads": options.threads, "repeats": options.repeats, "device": options.device}
    with torch.inference_mode():
        figures |= measure(options.repeats, options.device)
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def measure(repeats: int, device: str) -> dict[str, object]:
    """Median milliseconds of each side, the ratios, and the largest difference of the results."""
    tokens = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    kernel = released_kernel(SHAPE[-1]).to(device)
    sides: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "filter": (lambda: released_filter(tokens, kernel), lambda: low_pass(tokens))
    }
    for count in COUNTS:
        pool = SelectivePool(count, "released")
        sides[f"pool K={count}"] = (
            lambda count=count: released_pool(tokens, kernel, count),  # type: ignore[misc]
            lambda pool=pool: pool(tokens),  # type: ignore[misc]
        )
    figures: dict[str, object] = {}
    for name, (released, ours) in sides.items():
        difference = (released() - ours()).abs()  # also the warm-up
        figures[f"{name} largest difference"] = float(difference.max())
        figures[f"{name} share that differs"] = float((difference > 1e-5).float().mean())
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, (released, ours) in sides.items():
            seconds[name].append((timed(released, device), timed(ours, device)))
    for name, taken in seconds.items():
        figures[f"{name} released ms"] = round(1e3 * statistics.median(pair[0] for pair in taken), 2)
        figures[f"{name} ours ms"] = round(1e3 * statistics.median(pair[1] for pair in taken), 2)
        figures[f"{name} ratio"] = round(statistics.median(pair[0] / pair[1] for pair in taken), 2)
    return figures


def timed(run: Callable[[], Tensor], device: str) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def released_kernel(width: int) -> Tensor:
    """Gaussian of standard deviation sqrt(D) at the positions -D/2 + 1 .. D/2."""
    positions = torch.arange(-width // 2 + 1, width // 2 + 1, dtype=torch.float64)
    return torch.exp(-positions.square() / (2 * width)).float()


def released_filter(x: Tensor, kernel: Tensor) -> Tensor:
    """(B, P, D) -> (B, P, D) through the complex spectrum with both shifts."""
    spectrum = torch.fft.fftshift(torch.fft.fft(x, dim=-1), dim=-1) * kernel
    return torch.fft.ifft(torch.fft.ifftshift(spectrum, dim=-1), dim=-1).real


def released_pool(x: Tensor, kernel: Tensor, count: int) -> Tensor:
    """(B, P, D) -> (B, D), score x / |filtered - x|."""
    scores = x / (released_filter(x, kernel) - x).abs()
    return x.gather(1, scores.topk(count, dim=1).indices).mean(1)


if __name__ == "__main__":
    main()
