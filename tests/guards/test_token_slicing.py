"""Tokens are sliced in ``regista.tokens`` and nowhere else."""

from __future__ import annotations

import ast

import pytest

from tests.guards.source_tree import PACKAGE, parsed, python_files, relative
from tests.guards.token_slicing import square_grids, token_slices

ONLY_PLACE = PACKAGE / "tokens.py"


def with_torch(code: str) -> ast.Module:
    return ast.parse(f"import torch\n{code}\n")


def test_no_token_is_taken_by_number() -> None:
    found = [
        f"{relative(path)}:{line} {code}"
        for path in python_files("src", "examples", "benchmarks")
        if path != ONLY_PLACE
        for line, code in token_slices(parsed(path))
    ]
    assert not found, "use TokenLayout (take, split, patch_map, attention_block):\n" + "\n".join(found)


def test_no_grid_from_a_square_root() -> None:
    found = [
        f"{relative(path)}:{line} {code}"
        for path in python_files("src", "examples", "benchmarks")
        if path != ONLY_PLACE
        for line, code in square_grids(parsed(path))
    ]
    assert not found, "a grid is (rows, cols) of the layout, never a square root:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "x[:, 1:]",
        "x[:, 0]",
        "x[:, :1]",
        "x[:, -196:]",
        "x[:, 1:5, :]",
        "x[:, 0, :]",
        "attention[:, :, 0, 1:]",
        "attention[:, :, 1:]",
        "attention[..., 1:]",
        "x[..., 0, :]",
        "x[..., 1:, :]",
        "x[:, num_prefix_tokens:]",
        "x[:, self.num_prefix_tokens :]",
        "x[:, model.num_register_tokens + 1 :]",
        "x.narrow(1, 1, 4)",
        "x.select(-2, 0)",
    ],
)
def test_finds_tokens_taken_by_number(code: str) -> None:
    assert list(token_slices(with_torch(code)))


@pytest.mark.parametrize(
    "code",
    [
        "picture[:, :, 0]",
        "picture[:, :, :3]",
        "components[..., :3]",
        "x[..., 0]",
        "x[0]",
        "x[1:]",
        "images[start : start + step]",
        "offsets[index, 0]",
        "x[:, None]",
        "x[:, mask]",
        "x[:, where]",
        "x[..., None, :]",
        "x.narrow(-2, 0, 0)",
        "x.narrow(dim, where.start, where.stop - where.start)",
        "grid[:, rows]",
    ],
)
def test_leaves_other_indices_alone(code: str) -> None:
    assert not list(token_slices(with_torch(code)))


@pytest.mark.parametrize(
    "code",
    [
        "def f(boxes: np.ndarray): return boxes[:, 0]",
        "def f(boxes):\n    moved = np.asarray(boxes) * scale\n    moved = moved.clip(0, 1)\n    return moved[:, 1]",
        "def f(x: Tensor):\n    return x.cpu().numpy()[:, 1:]",
    ],
)
def test_arrays_hold_no_tokens(code: str) -> None:
    assert not list(token_slices(with_torch(code)))
    assert list(token_slices(with_torch("def f(boxes: Tensor):\n    x = torch.from_numpy(boxes)\n    return x[:, 0]")))


def test_numpy_files_hold_no_tokens() -> None:
    assert not list(token_slices(ast.parse("import numpy as np\nboxes[:, 0]")))


@pytest.mark.parametrize(
    "code",
    ["int(math.sqrt(n))", "int(n ** 0.5)", "round(np.sqrt(n - 1))", "math.isqrt(n)", "int((n - 1) ** 0.5 + 0.5)"],
)
def test_finds_square_grids(code: str) -> None:
    assert list(square_grids(ast.parse(code)))


@pytest.mark.parametrize("code", ["math.sqrt(width)", "head_dim ** -0.5", "int(n / 2)", "x.pow(2).sum().sqrt()"])
def test_leaves_other_roots_alone(code: str) -> None:
    assert not list(square_grids(ast.parse(code)))
