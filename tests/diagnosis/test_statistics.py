from __future__ import annotations

import numpy as np
import pytest
import torch

from regista.diagnosis.aggregation import boxes_to_cells, hit_ratio, mask_to_cells
from regista.diagnosis.neighbours import neighbour_cosine
from regista.diagnosis.onset import main_block, onset_block
from regista.diagnosis.outliers import find_outliers
from regista.diagnosis.pca import pca_maps
from regista.diagnosis.places import fixed_place, place_overlap
from regista.diagnosis.registers import effective_number
from regista.diagnosis.residue import PositionalResidue
from regista.diagnosis.sinks import find_sinks


def test_neighbour_cosine_equals_a_loop() -> None:
    embedded = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    found = neighbour_cosine(embedded, (3, 4))
    for image in range(2):
        for row in range(3):
            for col in range(4):
                around = [(row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)]
                own = embedded[image, row * 4 + col]
                cosines = [
                    torch.cosine_similarity(own, embedded[image, r * 4 + c], dim=0)
                    for r, c in around
                    if 0 <= r < 3 and 0 <= c < 4
                ]
                assert found[image, row, col] == pytest.approx(torch.stack(cosines).mean().item(), abs=1e-6)


def test_neighbour_cosine_of_constant_noise_and_one_cell() -> None:
    assert torch.allclose(neighbour_cosine(torch.ones(1, 20, 4), (4, 5)), torch.ones(1, 4, 5))
    noise = torch.randn(4, 400, 256, generator=torch.Generator().manual_seed(1))
    assert neighbour_cosine(noise, (20, 20)).mean().abs() < 0.01
    assert neighbour_cosine(torch.randn(1, 1, 4), (1, 1)).item() == 1


@pytest.mark.parametrize("fixed", [0.0, 0.5, 2.0])
def test_residue_is_the_variance_that_was_put_in(fixed: float) -> None:
    rng = torch.Generator().manual_seed(2)
    by_place = fixed**0.5 * torch.randn(100, 32, generator=rng)
    residue = PositionalResidue(100, 32)
    for _ in range(4):
        residue.update(by_place + torch.randn(3, 100, 32, generator=rng))
    assert residue.share() == pytest.approx(fixed / (fixed + 1), abs=0.04)


def test_residue_streams_and_needs_two_images() -> None:
    images = torch.randn(6, 10, 4, generator=torch.Generator().manual_seed(3))
    whole, parts = PositionalResidue(10, 4), PositionalResidue(10, 4)
    whole.update(images)
    for image in images.split([1, 2, 3]):
        parts.update(image)
    assert parts.share() == pytest.approx(whole.share(), abs=1e-12)
    one = PositionalResidue(10, 4)
    one.update(images[:1])
    assert one.share() is None


def test_places_fixed_moving_and_unknown() -> None:
    rng = torch.Generator().manual_seed(4)
    moving = torch.rand(8, 16, 16, generator=rng) < 0.03
    assert fixed_place(moving) == "moving"
    assert place_overlap(moving) == pytest.approx(0, abs=0.1)
    assert fixed_place(moving[:1].expand(8, -1, -1)) == "fixed"
    assert place_overlap(moving[:1].expand(8, -1, -1)) == pytest.approx(1)
    assert fixed_place(moving[:1]) is None
    assert fixed_place(torch.zeros(5, 4, 4, dtype=torch.bool)) is None


def _blocks(onset: int, last_fades: bool) -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    norms = 20 * torch.exp(0.05 * torch.randn(4, 8, 16, 16, generator=rng))
    mask = torch.rand(4, 16, 16, generator=rng) < 0.02
    for block in range(onset, 8 - last_fades):
        norms[:, block][mask] *= 4 + block
    return norms


@pytest.mark.parametrize("last_fades", [False, True])
def test_onset_is_the_first_block_without_a_gap(last_fades: bool) -> None:
    for onset in (0, 3, 6):
        norms = _blocks(onset, last_fades)
        found = [find_outliers(norms[:, block]) for block in range(8)]
        main = main_block(found)
        assert main == 7 - last_fades
        assert onset_block(found, main) == onset
    clean = [find_outliers(torch.full((1, 4, 4), 3.0))] * 3
    assert main_block(clean) is None
    assert onset_block(clean, None) is None


def test_sinks_are_found_and_a_centre_bias_is_not_one() -> None:
    rng = torch.Generator().manual_seed(6)
    received = torch.exp(0.3 * torch.randn(4, 16, 16, generator=rng))
    rows, cols = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centred = received * torch.exp(-((rows - 8) ** 2 + (cols - 8) ** 2) / 60)
    for clean in (received, centred, torch.ones(2, 5, 5)):
        assert not find_sinks(clean / clean.sum((1, 2), keepdim=True)).mask.any()
    truth = torch.rand(4, 16, 16, generator=rng) < 0.02
    received[truth] = 30
    shares = received / received.sum((1, 2), keepdim=True)
    found = find_sinks(shares)
    assert torch.equal(found.mask, truth)
    assert found.mass == pytest.approx((shares * truth).sum().item() / 4, rel=1e-5)


def test_effective_number_lies_between_one_and_the_count() -> None:
    orthogonal = torch.eye(4, 16).expand(2, -1, -1)
    assert torch.allclose(effective_number(orthogonal), torch.full((2,), 4.0), atol=1e-4)
    same = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(7)).expand(-1, 4, -1)
    assert torch.allclose(effective_number(same), torch.ones(2), atol=1e-3)


def test_hit_ratio_counts_by_hand() -> None:
    scores = torch.zeros(3, 4, 5)
    for image, (row, col) in enumerate([(1, 1), (3, 4), (0, 0)]):
        scores[image, row, col] = 1
    cells = boxes_to_cells(np.array([[14.0, 14.0, 42.0, 28.0]]), (4, 5), 14)
    assert sorted(map(tuple, np.argwhere(cells))) == [(1, 1), (1, 2)]
    hits = hit_ratio(scores, {0: cells, 1: cells, 2: np.zeros((4, 5), bool)})
    assert hits is not None
    assert hits.images == 2
    assert hits.ratio == 0.5
    assert hits.chance == pytest.approx(0.1)
    assert hit_ratio(scores, {}) is None


def test_mask_cells_need_more_than_half() -> None:
    mask = np.zeros((28, 28), bool)
    mask[:14, :7] = True
    assert not mask_to_cells(mask, 14).any()
    mask[0, 7] = True
    assert np.argwhere(mask_to_cells(mask, 14)).tolist() == [[0, 0]]


def test_pca_pictures_are_stable() -> None:
    patches = torch.randn(3, 30, 16, generator=torch.Generator().manual_seed(8)) * torch.arange(1, 17) ** 2
    pictures = pca_maps(patches, (5, 6))
    assert pictures.shape == (3, 5, 6, 3)
    assert pictures.min() >= 0
    assert pictures.max() <= 1
    order = torch.tensor([2, 0, 1])
    assert torch.allclose(pca_maps(patches[order], (5, 6)), pictures[order], atol=1e-5)
    assert torch.allclose(pca_maps(3 * patches + 1, (5, 6)), pictures, atol=1e-4)
    assert pca_maps(patches[:1, :2], (1, 2)).shape == (1, 1, 2, 3)
