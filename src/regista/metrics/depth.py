"""Errors of a depth map."""

from __future__ import annotations

from typing import Any

import numpy as np


def depth_metrics(
    pred: Any, target: Any, valid: Any = None, *, min_depth: float = 1e-3, max_depth: float = 10.0
) -> dict[str, float]:
    """Errors of one image; average them over images, which is not the same as over all pixels.

    rmse in metres; abs_rel mean of |pred - target| / target; delta1, delta2, delta3 shares of pixels with
    max(pred / target, target / pred) below 1.25, 1.25^2, 1.25^3; log10 mean of the absolute difference of
    decimal logarithms. Definitions of Eigen et al. (1406.2283).

    Args:
        pred, target: (H, W) in metres.
        valid: bool (H, W) of the pixels that count beside the range (an evaluation crop, say).
        min_depth, max_depth: Pixels count whose target is above the one and at most the other; predictions are
            clipped to them.

    Raises:
        ValueError: for maps that do not fit, NaN in the prediction, or no counted pixel.
    """
    found, wanted = (_map(values, name) for values, name in ((pred, "pred"), (target, "target")))
    if found.shape != wanted.shape:
        raise ValueError(f"pred and target are depth maps of one image, got {found.shape} and {wanted.shape}")
    if not 0 < min_depth < max_depth:
        raise ValueError(f"wanted 0 < min_depth < max_depth, got {min_depth} and {max_depth}")
    counted = (wanted > min_depth) & (wanted <= max_depth)
    if valid is not None:
        mask = np.asarray(valid.detach().cpu().numpy() if hasattr(valid, "detach") else valid)
        if mask.shape != wanted.shape or mask.dtype != np.bool_:
            raise ValueError(f"valid is a bool map {wanted.shape}, got {mask.dtype} {mask.shape}")
        counted &= mask
    if not counted.any():
        raise ValueError(f"no pixel counts: none has a depth above {min_depth} and at most {max_depth} m")
    if not np.isfinite(found[counted]).all():
        raise ValueError("pred has NaN or infinite depths")
    p, t = found[counted].clip(min_depth, max_depth), wanted[counted]
    ratio = np.maximum(p / t, t / p)
    shares = {f"delta{power}": float((ratio < 1.25**power).mean()) for power in (1, 2, 3)}
    return {
        "rmse": float(np.sqrt(np.mean((p - t) ** 2))),
        "abs_rel": float(np.mean(np.abs(p - t) / t)),
        **shares,
        "log10": float(np.mean(np.abs(np.log10(p) - np.log10(t)))),
    }


def _map(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} is a depth map (H, W) of one image, got shape {array.shape}")
    return array.astype(np.float64)
