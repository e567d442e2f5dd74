"""Singular defects: directions against numpy on explicit matrices, detection and repair against planted tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regista.layers.singular_defect import (
    LinearBlock,
    defect_alignment,
    defect_directions,
    singular_defect_mask,
    smooth_repair,
)

WIDTH = 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(matrix: Tensor, constant: Tensor | float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ matrix.T + constant


def linear_blocks(depth: int) -> tuple[list[LinearBlock], list[Tensor]]:
    """Blocks whose MLP is linear, and its matrices."""
    blocks, matrices = [], []
    for index in range(depth):
        parts = random(8, WIDTH, WIDTH, seed=index).unbind(0)
        matrices.append(parts[2] / 4)
        block = LinearBlock(
            value_weight=parts[0][:8] / 4,
            output_weight=parts[1][:, :8] / 4,
            mlp=linear(matrices[-1], parts[3][0]),
            norm1_weight=parts[4][0],
            norm2_weight=parts[5][0],
            norm2_bias=parts[5][1],
            gamma1=parts[6][0],
            gamma2=parts[7][0],
        )
        blocks.append(block)
    return blocks, matrices


def explicit_directions(blocks: list[LinearBlock], matrices: list[Tensor]) -> list[np.ndarray]:
    """Leading left singular vectors by numpy, each factor a full matrix."""
    centring = np.eye(WIDTH) - np.ones((WIDTH, WIDTH)) / WIDTH
    product, directions = np.eye(WIDTH), []

    def diagonal(x: Tensor | None) -> np.ndarray:
        assert x is not None
        return np.diag(x.numpy())

    for block, matrix in zip(blocks, matrices, strict=True):
        values = block.output_weight.numpy() @ block.value_weight.numpy()
        attention = diagonal(block.gamma1) @ values @ diagonal(block.norm1_weight) @ centring
        product = (np.eye(WIDTH) + attention) @ product
        mlp = diagonal(block.gamma2) @ matrix.numpy() @ diagonal(block.norm2_weight) @ centring
        product = (np.eye(WIDTH) + mlp) @ product
        directions.append(np.linalg.svd(product)[0][:, 0])
    return directions


@pytest.mark.parametrize("inputs", ["unit", "normed"])
def test_equals_explicit_matrices(inputs: str) -> None:
    blocks, matrices = linear_blocks(3)
    found = defect_directions(blocks, num_samples=100, inputs=inputs)  # type: ignore[arg-type]
    assert found.shape == (3, WIDTH)
    assert found.dtype == torch.float32
    for direction, wanted in zip(found, explicit_directions(blocks, matrices), strict=True):
        assert abs(float(direction.double() @ torch.from_numpy(wanted))) == pytest.approx(1, abs=1e-6)
        assert float(direction.norm()) == pytest.approx(1, abs=1e-6)
        assert float(direction[direction.abs().argmax()]) > 0


def test_planted_direction_is_found() -> None:
    planted = F.normalize(random(WIDTH, seed=7), dim=0)
    read = F.normalize(random(WIDTH, seed=8) - random(WIDTH, seed=8).mean(), dim=0)
    blocks, _ = linear_blocks(4)
    quiet = [replace(block, gamma1=torch.full((WIDTH,), 0.01), gamma2=torch.full((WIDTH,), 0.01)) for block in blocks]
    quiet[1] = LinearBlock(
        torch.zeros(8, WIDTH).double(), torch.zeros(WIDTH, 8).double(), linear(50 * torch.outer(planted, read))
    )
    found = defect_directions(quiet, num_samples=200).double()
    cosines = (found @ planted).abs().tolist()
    assert cosines[0] < 0.9
    assert min(cosines[1:]) > 0.99


def test_planted_through_a_gelu_mlp() -> None:
    """A biased GELU unit that writes along one direction; the curved part must not hide it."""
    planted = F.normalize(random(WIDTH, seed=7), dim=0).float()
    read, write = random(30, WIDTH, seed=1).float() / 4, random(WIDTH, 30, seed=2).float() / 20
    write[:, 3] = 40 * planted
    quiet = torch.zeros(8, WIDTH), torch.zeros(WIDTH, 8)
    block = LinearBlock(*quiet, lambda x: F.gelu(x @ read.T + 0.3) @ write.T)
    (found,) = defect_directions([block], num_samples=5000)
    assert abs(float(found @ planted)) > 0.99


def test_missing_parts_are_neutral() -> None:
    blocks, _ = linear_blocks(1)
    bare = LinearBlock(blocks[0].value_weight, blocks[0].output_weight, blocks[0].mlp)
    ones = torch.ones(WIDTH).double()
    full = replace(bare, norm1_weight=ones, norm2_weight=ones, norm2_bias=0 * ones, gamma1=ones, gamma2=ones)
    for inputs in ("unit", "normed"):
        found = [defect_directions([block], num_samples=100, inputs=inputs) for block in (bare, full)]  # type: ignore[arg-type]
        torch.testing.assert_close(found[0], found[1])


def test_wrong_blocks_are_named() -> None:
    blocks, _ = linear_blocks(2)
    with pytest.raises(ValueError, match="no blocks"):
        defect_directions([])
    with pytest.raises(ValueError, match="gamma1 of block 1 must be"):
        defect_directions([blocks[0], replace(blocks[1], gamma1=torch.ones(3))], num_samples=50)
    nan = torch.full((WIDTH,), float("nan"))
    with pytest.raises(ValueError, match="gamma2 of block 0 is NaN"):
        defect_directions([replace(blocks[0], gamma2=nan)], num_samples=50)
    with pytest.raises(ValueError, match=r"MLP of block 0 must give \(n, 12\), got \(n, 5\)"):
        defect_directions([replace(blocks[0], mlp=linear(random(5, WIDTH)))], num_samples=50)
    with pytest.raises(ValueError, match="MLP of block 0: wanted finite"):
        defect_directions([replace(blocks[0], mlp=lambda x: x * float("nan"))], num_samples=50)
    with pytest.raises(ValueError, match="inputs must be"):
        defect_directions(blocks, inputs="other")  # type: ignore[arg-type]


def planted_map(cells: list[tuple[int, int]], *, images: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens (images, 10, 12, 64) with defects of either sign in the first image, and the direction."""
    direction = F.normalize(random(64, seed=5), dim=0).float()
    tokens = random(images, 10, 12, 64, seed=6).float()
    for number, (row, col) in enumerate(cells):
        tokens[0, row, col] += (-1) ** number * 60 * direction
    return tokens, direction


def test_planted_tokens_are_found() -> None:
    cells = [(2, 3), (2, 4), (7, 9)]
    tokens, direction = planted_map(cells)
    mask = singular_defect_mask(tokens, direction)
    assert mask.nonzero().tolist() == [[0, *cell] for cell in cells]
    assert torch.equal(singular_defect_mask(tokens, -3 * direction), mask)
    singles = [singular_defect_mask(one, direction) for one in tokens.split(1)]
    assert torch.equal(mask, torch.cat(singles))


def test_rule_by_hand() -> None:
    tokens, direction = planted_map([(2, 3), (5, 5), (7, 9), (0, 2)])
    for deviations in (1.0, 2.5, 4.0):
        mask = singular_defect_mask(tokens, direction, num_deviations=deviations, ignore_border=False, min_tokens=1)
        for image in range(2):
            cosines = [
                abs(float(F.cosine_similarity(token, direction, dim=0))) for token in tokens[image].flatten(0, 1)
            ]
            mean = sum(cosines) / len(cosines)
            deviation = math.sqrt(sum((cosine - mean) ** 2 for cosine in cosines) / (len(cosines) - 1))
            wanted = [cosine > mean + deviations * deviation for cosine in cosines]
            assert mask[image].flatten().tolist() == wanted


def test_border_and_few_tokens() -> None:
    tokens, direction = planted_map([(0, 3), (4, 0), (9, 9), (2, 11), (5, 5)])
    assert singular_defect_mask(tokens, direction, min_tokens=1).nonzero().tolist() == [[0, 5, 5]]
    assert not singular_defect_mask(tokens, direction).any()
    assert int(singular_defect_mask(tokens, direction, ignore_border=False).sum()) == 5


def test_nothing_to_find() -> None:
    assert not singular_defect_mask(torch.zeros(1, 6, 6, 4), torch.ones(4)).any()
    assert not singular_defect_mask(torch.ones(1, 6, 6, 4), torch.ones(4), ignore_border=False, min_tokens=1).any()
    assert not singular_defect_mask(torch.ones(1, 1, 1, 4), torch.ones(4), ignore_border=False, min_tokens=1).any()


def test_deviation_is_that_of_a_sample() -> None:
    """One of 25 lies (n - 1) / sqrt(n) = 4.8 sample deviations above the mean (4.9 of the population)."""
    tokens = torch.zeros(1, 5, 5, 2)
    tokens[..., 1] = 1
    tokens[0, 2, 2] = torch.tensor([1.0, 0.0])
    direction = torch.tensor([1.0, 0.0])
    for deviations, found in ((4.75, 1), (4.85, 0)):
        mask = singular_defect_mask(tokens, direction, num_deviations=deviations, min_tokens=1)
        assert int(mask.sum()) == found


def test_alignment() -> None:
    direction = random(64, seed=5)
    tokens = torch.stack([direction * 3, -direction, torch.zeros(64).double()])
    assert defect_alignment(tokens, direction).tolist() == pytest.approx([1, 1, 0])
    assert defect_alignment(tokens.half(), direction).dtype == torch.float32
    with pytest.raises(ValueError, match=r"direction must be \(D,\)"):
        defect_alignment(tokens, direction[:3])


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_repair_equals_a_slow_loop(temperature: float) -> None:
    cells = [(0, 0), (2, 3), (2, 4), (9, 5), (7, 9)]
    tokens, direction = planted_map(cells)
    mask = torch.zeros(2, 10, 12, dtype=torch.bool)
    mask[0, [row for row, _ in cells], [col for _, col in cells]] = True
    mask[1, 3, 3] = True
    repaired = smooth_repair(tokens, mask, direction, temperature=temperature)
    assert torch.equal(repaired[~mask], tokens[~mask])
    for image, row, col in mask.nonzero().tolist():
        window = [
            (tokens[image, y, x], (2 - abs(y - row)) * (2 - abs(x - col)) / 16)
            for y in range(max(0, row - 1), min(10, row + 2))
            for x in range(max(0, col - 1), min(12, col + 2))
        ]
        logits = torch.stack([-F.cosine_similarity(token, direction, dim=0).abs() / temperature for token, _ in window])
        weights = logits.softmax(0) * torch.tensor([bell for _, bell in window])
        wanted = sum(weight * token for weight, (token, _) in zip(weights / weights.sum(), window, strict=True))
        torch.testing.assert_close(repaired[image, row, col], wanted, rtol=1e-5, atol=1e-5)


def test_repair_takes_defects_away() -> None:
    tokens, direction = planted_map([(2, 3), (5, 6), (7, 9)])
    mask = singular_defect_mask(tokens, direction)
    repaired = smooth_repair(tokens, mask, direction)
    assert int(mask.sum()) == 3
    assert not singular_defect_mask(repaired, direction, min_tokens=1).any()
    assert float(repaired.norm(dim=-1).max()) < 12
    assert smooth_repair(tokens.half(), mask, direction).dtype == torch.float16
    torch.testing.assert_close(repaired[:1], smooth_repair(tokens[:1], mask[:1], direction))


def test_mistakes_are_named() -> None:
    tokens, direction = planted_map([])
    mask = torch.zeros(2, 10, 12, dtype=torch.bool)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        smooth_repair(tokens, mask, direction, temperature=0)
    with pytest.raises(ValueError, match="direction is NaN"):
        singular_defect_mask(tokens, direction * float("nan"))
    with pytest.raises(ValueError, match="direction is NaN"):
        smooth_repair(tokens, mask, direction * float("nan"))
    tokens[1, 0, 0, 0] = float("inf")
    for run in (lambda: singular_defect_mask(tokens, direction), lambda: smooth_repair(tokens, mask, direction)):
        with pytest.raises(ValueError, match=r"images \[1\]"):
            run()
