"""Token layouts against plain index arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from regista.tokens import NAMES, Segment, TokenLayout, square_grid

GRID = (3, 4)
ORDERS = list(itertools.permutations(("cls", "registers", "patches")))
CASES = list(itertools.product(ORDERS, (0, 1, 4, 16), (0, 1)))


def numbered(layout: TokenLayout, batch: int = 2, width: int = 3) -> Tensor:
    """(B, N, D) where every number says which token of which image it is."""
    images = 1000.0 * torch.arange(batch).view(batch, 1, 1)
    return (images + torch.arange(layout.num_tokens).view(1, -1, 1)).expand(batch, -1, width).clone()


def make(order: tuple[str, ...], registers: int, cls: int) -> TokenLayout:
    return TokenLayout.of(GRID, 14, num_cls_tokens=cls, num_register_tokens=registers, order=order)


@pytest.mark.parametrize(("order", "registers", "cls"), CASES)
def test_split_and_join_are_inverse_in_every_order(order: tuple[str, ...], registers: int, cls: int) -> None:
    layout = make(order, registers, cls)
    x = numbered(layout)
    parts = layout.split(x)
    counts = {"cls": cls, "registers": registers, "patches": 12}
    start = 0
    for name in order:
        wanted = torch.arange(start, start + counts[name])
        assert torch.equal(parts[name].select(0, 0).select(-1, 0), wanted.float())
        assert layout.count(name) == counts[name]
        if counts[name]:
            assert layout.slice(name) == slice(start, start + counts[name])
        start += counts[name]
    assert layout.num_tokens == start == 12 + registers + cls
    assert layout.num_prefix_tokens == registers + cls
    assert torch.equal(layout.join(parts), x)
    assert torch.equal(layout.join(dict(reversed(parts.items()))), x)
    turned = x.transpose(1, 2)
    assert torch.equal(layout.join(layout.split(turned, dim=-1), dim=-1), turned)


@pytest.mark.parametrize(("order", "registers", "cls"), CASES)
def test_patches_become_rows_and_columns(order: tuple[str, ...], registers: int, cls: int) -> None:
    layout = make(order, registers, cls)
    x = numbered(layout)
    maps = layout.patch_map(x)
    assert maps.shape == (2, 3, *GRID)
    first = layout.slice("patches").start
    for row, col in itertools.product(range(GRID[0]), range(GRID[1])):
        assert maps[1, 2, row, col] == 1000 + first + row * GRID[1] + col


@pytest.mark.parametrize(("order", "registers", "cls"), CASES)
def test_attention_blocks(order: tuple[str, ...], registers: int, cls: int) -> None:
    layout = make(order, registers, cls)
    tokens = layout.num_tokens
    attention = torch.arange(2.0 * tokens * tokens).view(2, 1, tokens, tokens)
    for query, key in itertools.product(("cls", "registers", "patches"), repeat=2):
        block = layout.attention_block(attention, query, key)
        assert torch.equal(block, attention[..., layout.slice(query), layout.slice(key)])
        assert block.shape == (2, 1, layout.count(query), layout.count(key))


@pytest.mark.parametrize(("order", "registers", "cls"), CASES)
@pytest.mark.parametrize("new", [0, 1, 5])
def test_inserting_and_removing_registers(order: tuple[str, ...], registers: int, cls: int, new: int) -> None:
    layout = make(order, registers, cls)
    x = numbered(layout)
    wider, wider_layout = layout.insert_registers(x, torch.full((2, new, 3), -1.0))
    assert wider_layout.num_register_tokens == new
    assert wider.shape == (2, 12 + cls + new, 3)
    assert (wider_layout.take(wider, "registers") == -1).all()
    for name in ("cls", "patches"):
        assert torch.equal(wider_layout.take(wider, name), layout.take(x, name))
    if registers and new:
        names = [name for name, _ in layout.segments]
        assert [name for name, _ in wider_layout.segments] == names
    bare, bare_layout = wider_layout.remove_registers(wider)
    assert bare_layout.num_register_tokens == 0
    assert bare_layout == layout.with_registers(0)
    assert torch.equal(bare, bare_layout.join({**layout.split(x), "registers": x.narrow(1, 0, 0)}))


def test_new_registers_stand_behind_cls_or_first() -> None:
    def names(layout: TokenLayout) -> list[str]:
        return [name for name, _ in layout.with_registers(2).segments]

    assert names(TokenLayout.of(GRID, 14)) == ["cls", "registers", "patches"]
    assert names(TokenLayout.of(GRID, 14, num_cls_tokens=0)) == ["registers", "patches"]
    assert names(TokenLayout.of(GRID, 14, order=("patches", "cls"))) == ["patches", "cls", "registers"]
    after_patches = TokenLayout.of(GRID, 14).with_registers(2, after="patches")
    assert [name for name, _ in after_patches.segments] == ["cls", "patches", "registers"]


@pytest.mark.parametrize("length", [12, 13, 18, 845])
def test_a_wrong_length_is_refused_with_both_numbers_and_the_layout(length: int) -> None:
    layout = TokenLayout.of(GRID, 14, num_register_tokens=4)
    x = torch.zeros(2, length, 3)
    message = rf"got {length} tokens, the layout has 17 \(1 cls \+ 4 registers \+ 12 patches; grid 3 rows x 4 cols"
    for call in (layout.split, layout.check, layout.patch_map, layout.remove_registers):
        with pytest.raises(ValueError, match=message):
            call(x)
    with pytest.raises(ValueError, match=message):
        layout.attention_block(torch.zeros(1, 1, length, length), "cls", "patches")


def test_wrong_parts_are_refused_with_both_numbers() -> None:
    layout = TokenLayout.of(GRID, 14, num_register_tokens=4)
    parts = layout.split(torch.zeros(2, 17, 3))
    with pytest.raises(ValueError, match=r"'registers' has 3 tokens, the layout has 4"):
        layout.join({**parts, "registers": torch.zeros(2, 3, 3)})
    with pytest.raises(ValueError, match=r"'registers' has 0 tokens, the layout has 4"):
        layout.join({name: part for name, part in parts.items() if name != "registers"})
    with pytest.raises(ValueError, match=r"'extra' has 2 tokens, the layout has 0"):
        layout.join({**parts, "extra": torch.zeros(2, 2, 3)})
    with pytest.raises(ValueError, match="got 11 values for 12 patches"):
        layout.to_grid(torch.zeros(2, 11))


@pytest.mark.parametrize(
    ("segments", "grid", "message"),
    [
        ((("cls", 1), ("patches", 11)), (3, 4), "11 patch tokens do not fill a grid of 3 rows x 4 cols"),
        ((("cls", 1),), (3, 4), "0 patch tokens"),
        ((("patches", 12), ("patches", 12)), (3, 4), "distinct"),
        ((("storage", 4), ("patches", 12)), (3, 4), "storage"),
        ((("registers", -1), ("patches", 12)), (3, 4), "counts"),
        ((("patches", 0),), (0, 4), "0 rows"),
    ],
)
def test_impossible_layouts_are_refused(
    segments: tuple[tuple[str, int], ...], grid: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenLayout(tuple(Segment(*segment) for segment in segments), grid, 14)


def test_unknown_segment_names_are_refused() -> None:
    layout = TokenLayout.of(GRID, 14)
    for call in (layout.slice, layout.count):
        with pytest.raises(ValueError, match="unknown segment 'storage'"):
            call("storage")
    with pytest.raises(ValueError, match="unknown segment"):
        layout.take(torch.zeros(1, 13, 2), "storage")


def test_extra_tokens_keep_their_place() -> None:
    segments = tuple(Segment(*pair) for pair in (("cls", 1), ("extra", 1), ("registers", 2), ("patches", 12)))
    layout = TokenLayout(segments, GRID, 14)
    x = numbered(layout)
    assert torch.equal(layout.join(layout.split(x)), x)
    assert layout.take(x, "extra").unique().tolist() == [1.0, 1001.0]
    wider, wider_layout = layout.insert_registers(x, torch.zeros(2, 5, 3))
    assert torch.equal(wider_layout.take(wider, "extra"), layout.take(x, "extra"))
    assert "extra" not in TokenLayout.of(GRID, 14).split(torch.zeros(1, 13, 2))


def test_other_grids_and_sizes() -> None:
    layout = TokenLayout.of((6, 5), 14, num_register_tokens=4)
    assert layout.image_size == (84, 70)
    assert layout.with_grid((2, 3)) == TokenLayout.of((2, 3), 14, num_register_tokens=4)
    assert layout.to_grid(torch.arange(30.0)).shape == (6, 5)
    assert torch.equal(layout.to_grid(torch.arange(30.0)), torch.arange(30.0).view(6, 5))
    assert NAMES == ("cls", "registers", "patches", "extra")


def test_equal_layouts_are_one_key() -> None:
    table = {TokenLayout.of(GRID, 14): "a"}
    table[TokenLayout.of((3, 4), 14, num_register_tokens=0)] = "b"
    assert list(table.values()) == ["b"]


def test_square_grids() -> None:
    assert [square_grid(side * side) for side in range(1, 200)] == [(side, side) for side in range(1, 200)]
    for count in (-4, -1, 0, 2, 3, 1370, 37 * 37 - 1, 37 * 38):
        with pytest.raises(ValueError, match=f"{count} patches do not fill a square grid"):
            square_grid(count)
