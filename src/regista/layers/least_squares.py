"""The linear map nearest to a function of Gaussian inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_CHUNK = 4096


def least_squares_map(
    function: Callable[[Tensor], Tensor],
    width: int,
    *,
    num_samples: int = 100_000,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The matrix A (E, width) for which A x + c is nearest to ``function(x)`` over x ~ N(0, 1).

    Ordinary least squares by normal equations in float64, gathered batch by batch, so the samples
    never lie in memory together. The constant c is fitted too and dropped.

    Args:
        function: (n, width) -> (n, E), called with ``dtype`` on ``device``.
        width: Length of an input.
        num_samples: More than ``width``.
        seed: Of the inputs, drawn on the CPU, so that every device sees the same.

    Raises:
        ValueError: for too few samples, or outputs of another length or not finite.
    """
    device = torch.device(device)
    samples = GaussianSamples(width, num_samples, seed, device)
    return samples.fit(lambda x: function(x.to(device, dtype)), "function")


class GaussianSamples:
    """Inputs drawn anew in each pass, the same every time; their normal matrix is factored once.

    Args:
        width: D, the length of an input.
        num_samples: More than D.
        seed: Of the inputs, drawn on the CPU.
        device: Where the sums are kept; the CPU for a device without float64.
    """

    def __init__(self, width: int, num_samples: int, seed: int, device: torch.device) -> None:
        if num_samples <= width + 1:
            raise ValueError(f"num_samples must exceed the width {width}, got {num_samples}; the paper takes 100000")
        device = torch.device("cpu") if device.type == "mps" else device
        self.width, self.num_samples, self.seed, self.device = width, num_samples, seed, device
        self._mean = torch.zeros(width, dtype=torch.float64, device=device)
        normal = torch.zeros(width, width, dtype=torch.float64, device=device)
        for x in self.chunks():
            normal += x.T @ x
            self._mean += x.sum(0) / num_samples
        normal -= num_samples * torch.outer(self._mean, self._mean)
        self._factor = torch.linalg.cholesky(normal)

    def chunks(self) -> Iterator[Tensor]:
        """All inputs in batches (n, D) float64."""
        generator = torch.Generator().manual_seed(self.seed)
        for start in range(0, self.num_samples, _CHUNK):
            x = torch.randn(min(_CHUNK, self.num_samples - start), self.width, generator=generator)
            yield x.to(self.device, torch.float64)

    @torch.no_grad()
    def fit(self, function: Callable[[Tensor], Tensor], name: str) -> Tensor:
        """Matrix (E, D) float64 of the best linear map; ``function`` is (n, D) float64 -> (n, E)."""
        cross: Tensor | None = None
        for x in self.chunks():
            y = function(x)
            if y.ndim != 2 or len(y) != len(x) or not y.isfinite().all():
                raise ValueError(
                    f"{name}: wanted finite outputs ({len(x)}, D), got {tuple(y.shape)}, or NaN among them"
                )
            part = (x - self._mean).T @ y.to(self.device).double()
            cross = part if cross is None else cross + part
        assert cross is not None
        solved: Tensor = torch.cholesky_solve(cross, self._factor)
        return solved.T
