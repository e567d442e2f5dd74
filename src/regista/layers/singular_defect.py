"""The direction into which a ViT pulls its defect tokens, from the weights alone.

SINDER, "Repairing the Singular Defects of DINOv2" (arXiv 2407.16826), section 3: each block is
replaced by a linear map; the leading left singular vector of their product is the direction that
high-norm tokens share, whatever the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regista.layers.channel_filter import at_least_float32
from regista.layers.least_squares import GaussianSamples
from regista.layers.neighbour_repair import KERNELS, check_map, window_average

Inputs = Literal["unit", "normed"]


@dataclass(frozen=True)
class LinearBlock:
    """The parts of a pre-norm block that its linear map needs; D is the width, V = heads * head width.

    Attributes:
        value_weight: (V, D), the value part of the qkv weight, applied as ``x @ value_weight.T``.
        output_weight: (D, V), the projection behind the attention.
        mlp: (n, D) -> (n, D), the real MLP in evaluation mode, from the output of the second norm
            to before LayerScale. GELU, SwiGLU or any other. Takes the dtype and device of
            ``value_weight``.
        norm1_weight, norm2_weight: (D,), or None for LayerNorm without affine part.
        norm2_bias: (D,) or None; matters for ``inputs="normed"`` alone.
        gamma1, gamma2: (D,) LayerScale, or None without.
    """

    value_weight: Tensor
    output_weight: Tensor
    mlp: Callable[[Tensor], Tensor]
    norm1_weight: Tensor | None = None
    norm2_weight: Tensor | None = None
    norm2_bias: Tensor | None = None
    gamma1: Tensor | None = None
    gamma2: Tensor | None = None


def defect_directions(
    blocks: Sequence[LinearBlock], *, num_samples: int = 100_000, seed: int = 0, inputs: Inputs = "unit"
) -> Tensor:
    """Defect direction after each block: (depth, D) float32, unit norm.

    A block is (I + diag(gamma2) M diag(w2) C) (I + diag(gamma1) Wo Wv diag(w1) C): C takes the
    mean over the channels away, as LayerNorm does (its division by the standard deviation is left
    out), w1 and w2 are the norms' weights, and M is the linear map nearest to the MLP on Gaussian
    inputs (``least_squares_map``). The direction after block b is the leading left singular
    vector of the product of blocks 0 to b. A singular vector has no sign: here its entry of
    largest size is positive.

    Args:
        blocks: All blocks from the first on; depth = len(blocks).
        num_samples: Gaussian inputs for each MLP, more than D; the paper takes 100,000. Time grows
            with it; the error falls with its root.
        seed: Of the Gaussian inputs, which all blocks share.
        inputs: "unit": the MLP sees N(0, 1) (the paper). "normed": it sees what the second norm
            makes of N(0, 1), its weight and bias applied, as in the model.

    Raises:
        ValueError: for no blocks, shapes that do not fit, too few samples, or weights or MLP
            outputs that are NaN or infinite; the message names the block.
    """
    if not blocks:
        raise ValueError("no blocks given; pass one LinearBlock for each block of the model")
    if inputs not in ("unit", "normed"):
        raise ValueError(f"inputs must be 'unit' or 'normed', got {inputs!r}")
    width = blocks[0].value_weight.shape[-1]
    samples = GaussianSamples(width, num_samples, seed, blocks[0].value_weight.device)
    product = torch.eye(width, dtype=torch.float64, device=samples.device)
    directions = []
    for index, block in enumerate(blocks):
        _check_block(block, index, width)
        product = block_map(block, samples, inputs, index) @ product
        product = product / product.norm()  # forty blocks may leave the range
        directions.append(leading_direction(product))
    return torch.stack(directions).float()


def block_map(block: LinearBlock, samples: GaussianSamples, inputs: Inputs = "unit", index: int = 0) -> Tensor:
    """The linear map of a whole block: (D, D) float64."""

    def wide(x: Tensor | None) -> Tensor:
        ones = torch.ones(samples.width, dtype=torch.float64, device=samples.device)
        return ones if x is None else x.detach().to(samples.device).double()

    def seen(x: Tensor) -> Tensor:
        if inputs == "normed":
            x = x * wide(block.norm2_weight)
            x = x if block.norm2_bias is None else x + wide(block.norm2_bias)
        return block.mlp(x.to(block.value_weight.device, block.value_weight.dtype))

    identity = torch.eye(samples.width, dtype=torch.float64, device=samples.device)
    centring = identity - 1 / samples.width
    attention = wide(block.output_weight) @ wide(block.value_weight) * wide(block.norm1_weight)
    attention = identity + wide(block.gamma1).unsqueeze(1) * (attention @ centring)
    mlp = samples.fit(seen, f"MLP of block {index}")
    if len(mlp) != samples.width:
        raise ValueError(f"MLP of block {index} must give (n, {samples.width}), got (n, {len(mlp)})")
    if inputs == "unit":
        mlp = mlp * wide(block.norm2_weight)
    return (identity + wide(block.gamma2).unsqueeze(1) * (mlp @ centring)) @ attention


def leading_direction(matrix: Tensor) -> Tensor:
    """Leading left singular vector of a (D, E) float64 matrix: (D,), its largest entry positive."""
    vector: Tensor = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.T[-1]  # values ascend
    return vector * vector[vector.abs().argmax()].sign()


def defect_alignment(tokens: Tensor, direction: Tensor) -> Tensor:
    """|cos| of each token and a direction: (..., D), (D,) -> (...), float32 at least; 0 for a zero token."""
    if direction.shape != tokens.shape[-1:]:
        raise ValueError(f"direction must be (D,) = ({tokens.shape[-1]},), got {tuple(direction.shape)}")
    if not direction.isfinite().all():
        raise ValueError("the direction is NaN or infinite; check the model's weights")
    unit = F.normalize(at_least_float32(tokens), dim=-1)
    return (unit @ F.normalize(direction.to(unit), dim=0)).abs().clamp(max=1)


def singular_defect_mask(
    tokens: Tensor, direction: Tensor, *, num_deviations: float = 4.0, ignore_border: bool = True, min_tokens: int = 3
) -> Tensor:
    """Cells whose token points along the defect direction: (B, rows, cols, D), (D,) -> (B, rows, cols) bool.

    |cos(token, direction)| above the mean of the image plus ``num_deviations`` standard
    deviations (SINDER: 4). Mean and deviation are over all cells of the image, border and defects
    included, so a share of defects above 1 / (1 + 4^2), or 5.9 %, hides itself.

    Args:
        tokens: Output of the block that ``direction`` belongs to, before any final norm.
        ignore_border: Never flag the outermost ring of cells (SINDER).
        min_tokens: An image with fewer flagged cells has none (SINDER: 3).

    Raises:
        ValueError: for shapes that do not fit, or a value that is NaN or infinite.
    """
    check_map(tokens)
    aligned = defect_alignment(tokens, direction)  # (B, rows, cols)
    cells = aligned.flatten(1)
    deviation = cells.std(1, correction=min(1, cells.shape[1] - 1))
    limit = cells.mean(1) + num_deviations * deviation
    mask = aligned > limit[:, None, None]
    if ignore_border:
        rows, cols = mask.shape[1:]
        row, col = torch.arange(rows, device=mask.device)[:, None], torch.arange(cols, device=mask.device)
        mask &= (row > 0) & (row < rows - 1) & (col > 0) & (col < cols - 1)
    return mask & (mask.sum((1, 2)) >= min_tokens)[:, None, None]


def smooth_repair(tokens_map: Tensor, mask: Tensor, direction: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Masked tokens replaced by what SINDER trains them towards: (B, rows, cols, D) -> same shape.

    The mean over the 3 x 3 window, the cell itself included, with Gaussian weights (1, 2, 1) x
    (1, 2, 1) times softmax(-|cos(token, direction)| / temperature): tokens along the defect
    direction weigh next to nothing. All cells at once from the given map, cells beyond the border
    left out; other cells keep their bits.

    Raises:
        ValueError: for shapes that do not fit, a temperature <= 0, or a value that is NaN or infinite.
    """
    check_map(tokens_map, mask)
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; SINDER takes 0.1")
    wide = at_least_float32(tokens_map)
    aligned = defect_alignment(wide, direction)
    weights = torch.exp((aligned.amin((1, 2), keepdim=True) - aligned) / temperature)
    repaired, _ = window_average(wide, mask, weights, KERNELS["gaussian"])
    return torch.where(mask.unsqueeze(-1), repaired.to(tokens_map.dtype), tokens_map)


def _check_block(block: LinearBlock, index: int, width: int) -> None:
    inner = block.value_weight.shape[0]
    wanted: dict[str, tuple[int, ...]] = {"value_weight": (inner, width), "output_weight": (width, inner)}
    wanted |= dict.fromkeys(("norm1_weight", "norm2_weight", "norm2_bias", "gamma1", "gamma2"), (width,))
    for name, shape in wanted.items():
        value = getattr(block, name)
        if value is None:
            continue
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} of block {index} must be {shape}, got {tuple(value.shape)}")
        if not value.isfinite().all():
            raise ValueError(f"{name} of block {index} is NaN or infinite; check the weights")
