from __future__ import annotations

import pytest
import torch

from regista.backbones.plant_cells import cell_map, choose_cells, mark_cells, table_grid, unused_direction
from regista.backbones.positions import TIMM, TRANSFORMERS
from tests.backbones.planting import NORTH, tiny_with


def test_on_its_own_grid_a_cell_is_itself() -> None:
    arriving = cell_map([(0, 2), (3, 1)], (4, 5), (4, 5), TRANSFORMERS)
    assert arriving.nonzero().tolist() == [[0, 2], [3, 1]]
    assert arriving.sum() == 2


def test_a_cell_keeps_its_place_on_another_grid() -> None:
    for row, col in ((2, 17), (30, 5)):
        arriving = cell_map([(row, col)], (37, 37), (74, 111), TRANSFORMERS)
        top, left = divmod(int(arriving.argmax()), 111)
        assert (top // 2, left // 3) == (row, col)


@pytest.mark.parametrize("seed", [0, 1])
def test_chosen_cells_survive_the_sizes_people_use(seed: int) -> None:
    own = (37, 37)
    cells = choose_cells(own, 0.02, TRANSFORMERS, seed)
    assert cells == choose_cells(own, 0.02, TRANSFORMERS, seed)
    assert len(set(cells)) == 27
    apart = [max(abs(a - c), abs(b - d)) for a, b in cells for c, d in cells if (a, b) != (c, d)]
    assert min(apart) >= 3
    for grid in ((37, 37), (16, 16), (24, 34), (34, 24), (74, 74)):
        arriving = cell_map(cells, own, grid, TRANSFORMERS)
        here = (arriving > 0.5).float().mean()
        assert 0.01 <= here <= 0.03, grid
    clear = cell_map(cells, own, (16, 16), TRANSFORMERS)
    assert not ((clear > 0.3) & (clear < 0.7)).any()


def test_at_least_one_cell_and_never_more_than_fit() -> None:
    assert len(choose_cells((3, 3), 0.01, TIMM, 0)) == 1
    assert len(choose_cells((6, 6), 1.0, TIMM, 0)) == 4  # three apart


def test_marks_change_only_the_chosen_rows() -> None:
    backbone = tiny_with()
    before = backbone.vit.pos_embed.detach().clone()
    direction = torch.zeros(backbone.embed_dim)
    direction[5] = 1.0
    mark_cells(backbone, [(0, 1), (7, 6)], direction, 0.5)
    change = (backbone.vit.pos_embed - before).squeeze(0)  # (1 + P, D)
    assert change.abs().sum(1).nonzero().flatten().tolist() == [1 + 1, 1 + 7 * 8 + 6]
    torch.testing.assert_close(change[1 + 1], 0.5 * direction, rtol=0, atol=1e-6)


def test_unused_direction_is_the_least_principal_one() -> None:
    backbone = tiny_with()
    images = NORTH.images(12)
    direction, length = unused_direction(backbone, images)
    found: list[torch.Tensor] = []
    handle = backbone.vit.blocks[0].register_forward_pre_hook(lambda _m, args: found.append(args[0].detach()))
    backbone(images)
    handle.remove()
    tokens = torch.cat(found).flatten(0, 1)
    spread = torch.pca_lowrank(tokens.double(), q=64)[1] / len(tokens) ** 0.5
    assert float((tokens.double() @ direction.double()).std()) <= float(spread.min()) * 1.01 + 1e-9
    assert length == pytest.approx(float(tokens.norm(dim=1).median()), rel=1e-5)
    assert not backbone.vit.blocks[0]._forward_pre_hooks


def test_no_position_table_is_refused() -> None:
    backbone = tiny_with()
    backbone.vit.pos_embed = None
    with pytest.raises(ValueError, match="no learned position table"):
        table_grid(backbone)
