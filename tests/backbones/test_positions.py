"""Position tables against each library's own resizing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torchvision.models.vision_transformer import interpolate_embeddings

from regista.backbones.positions import (
    DINOV2_HUB,
    OPEN_CLIP,
    TIMM,
    TORCHVISION,
    TRANSFORMERS,
    PositionResize,
    resize_positions,
    swapped_attributes,
    swapped_parameter,
)

GRIDS = [(5, 4), (9, 4), (4, 9), (6, 7), (3, 3), (12, 12), (1, 20)]


def table(grid: tuple[int, int], prefix: int = 0, width: int = 8) -> Tensor:
    return torch.randn(1, prefix + grid[0] * grid[1], width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", [TIMM, OPEN_CLIP, TRANSFORMERS, TORCHVISION, PositionResize("bilinear")])
def test_every_size_from_1_to_200_cells_comes_out_exactly(how: PositionResize) -> None:
    old = table((37, 37), prefix=1, width=1)
    for cells in range(1, 201):
        for grid in ((cells, 3), (2, cells)):
            new = resize_positions(old, (37, 37), grid, num_prefix_tokens=1, how=how)
            assert new.shape == (1, 1 + grid[0] * grid[1], 1)
            assert torch.isfinite(new).all()


@pytest.mark.parametrize("how", [TIMM, TRANSFORMERS, TORCHVISION])
def test_the_same_grid_keeps_every_bit(how: PositionResize) -> None:
    old = table((5, 7), prefix=2)
    assert resize_positions(old, (5, 7), (5, 7), num_prefix_tokens=2, how=how) is old


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_timm(grid: tuple[int, int], prefix: int) -> None:
    for old_grid in ((6, 6), (9, 4)):
        old = table(old_grid, prefix)
        wanted = resample_abs_pos_embed(old, list(grid), list(old_grid), num_prefix_tokens=prefix)
        assert torch.equal(resize_positions(old, old_grid, grid, num_prefix_tokens=prefix, how=TIMM), wanted)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("kind", "how"), [("Dinov2", TRANSFORMERS), ("Dinov2WithRegisters", TIMM)])
def test_transformers(grid: tuple[int, int], kind: str, how: PositionResize) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=84, patch_size=14, mlp_ratio=1
    )
    embeddings = getattr(transformers, f"{kind}Model")(config).embeddings
    old = table((6, 6), 1)
    embeddings.position_embeddings = nn.Parameter(old)
    tokens = torch.zeros(1, 1 + grid[0] * grid[1], 8)
    with torch.no_grad():
        wanted = embeddings.interpolate_pos_encoding(tokens, 14 * grid[0], 14 * grid[1])
    assert torch.equal(resize_positions(old, (6, 6), grid, num_prefix_tokens=1, how=how), wanted)


@pytest.mark.parametrize("cells", [3, 4, 9, 12])
def test_torchvision(cells: int) -> None:
    state = interpolate_embeddings(14 * cells, 14, {"encoder.pos_embedding": table((6, 6), 1)})
    got = resize_positions(table((6, 6), 1), (6, 6), (cells, cells), num_prefix_tokens=1, how=TORCHVISION)
    assert torch.equal(got, state["encoder.pos_embedding"])


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid[0] * grid[1] != 36])  # there it keeps the old aspect
def test_open_clip(grid: tuple[int, int]) -> None:
    open_clip = pytest.importorskip("open_clip.model")
    state = {"visual.positional_embedding": table((6, 6), 1).squeeze(0)}
    open_clip.resize_pos_embed(state, SimpleNamespace(visual=SimpleNamespace(grid_size=grid)))
    got = resize_positions(table((6, 6), 1), (6, 6), grid, num_prefix_tokens=1, how=OPEN_CLIP)
    assert torch.equal(got.squeeze(0), state["visual.positional_embedding"])


def test_the_conventions_are_far_apart() -> None:
    old = table((37, 37), width=64)

    def distance(a: PositionResize, b: PositionResize) -> float:
        first, second = (resize_positions(old, (37, 37), (16, 16), how=how) for how in (a, b))
        return float((first - second).norm() / second.norm())

    assert distance(TIMM, TRANSFORMERS) > 0.2
    assert distance(TORCHVISION, TRANSFORMERS) > 0.2
    assert OPEN_CLIP.to_dict() == {"mode": "bicubic", "antialias": True, "align_corners": False, "offset": 0.0}


def test_prefix_rows_and_the_dtype_stay() -> None:
    old = table((6, 6), 5).to(torch.bfloat16)
    new = resize_positions(old, (6, 6), (4, 3), num_prefix_tokens=5)
    assert new.dtype == torch.bfloat16
    assert torch.equal(new.narrow(1, 0, 5), old.narrow(1, 0, 5))
    wanted = resize_positions(old.float(), (6, 6), (4, 3), num_prefix_tokens=5)
    assert torch.equal(new, wanted.to(torch.bfloat16))


def test_rows_stay_rows() -> None:
    old = torch.arange(6.0).repeat_interleave(4).reshape(1, 24, 1)  # (6 rows, 4 cols), value = row
    new = resize_positions(old, (6, 4), (3, 8), how=TIMM).reshape(3, 8)
    assert torch.allclose(new, new.narrow(1, 0, 1).expand(3, 8), atol=1e-5)
    assert (new.diff(dim=0) > 1).all()


def test_a_table_of_another_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"37 rows, wanted 36 \(0 prefix \+ 6x6\)"):
        resize_positions(table((6, 6), 1), (6, 6), (3, 3))


def test_gradients_flow_through_a_swapped_parameter_and_it_comes_back() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(table((4, 4)))

    holder = Holder()
    before = holder.table
    resized = resize_positions(holder.table, (4, 4), (2, 3))
    with swapped_parameter(holder, "table", resized):
        assert holder.table is resized
        holder.table.sum().backward()
    assert holder.table is before
    assert before.grad is not None
    assert before.grad.abs().sum() > 0
    with pytest.raises(KeyError), swapped_parameter(holder, "table", resized):
        raise KeyError
    assert holder.table is before


def test_attributes_come_back_after_an_exception() -> None:
    holder: Any = SimpleNamespace(a=1, b=2)
    with swapped_attributes(holder, a=3, b=4):
        assert (holder.a, holder.b) == (3, 4)
    assert (holder.a, holder.b) == (1, 2)
    with pytest.raises(KeyError), swapped_attributes(holder, a=3, b=4):
        raise KeyError
    assert (holder.a, holder.b) == (1, 2)
    with pytest.raises(AttributeError), swapped_attributes(holder, a=3, missing=4):
        pass
    assert holder.a == 1


def test_the_hubs_offset_never_costs_a_row() -> None:
    square = table((37, 37), width=2)
    for side in (*range(1, 80), 86, 115, 123, 156, 172, 193):
        assert resize_positions(square, (37, 37), (side, 5), how=DINOV2_HUB).shape == (1, side * 5, 2)


def test_the_hubs_offset_is_dinov2s_own() -> None:
    square = table((6, 6), width=4)
    cells = square.reshape(1, 6, 6, 4).permute(0, 3, 1, 2)
    factors = ((9 + 0.1) / 6, (4 + 0.1) / 6)
    wanted = nn.functional.interpolate(cells, scale_factor=factors, mode="bicubic").flatten(2).transpose(1, 2)
    assert torch.equal(resize_positions(square, (6, 6), (9, 4), how=DINOV2_HUB), wanted)
