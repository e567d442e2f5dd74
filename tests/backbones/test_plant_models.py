from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regista.backbones import plant_models
from regista.backbones.demo_weights import demo_backbone
from regista.backbones.plant import Kind
from regista.backbones.plant_models import demo_planted, demo_planted_backbone
from regista.backbones.plant_photos import fit_photos, photo_crops
from regista.backbones.timm import TimmBackbone
from tests.backbones.planting import outlier_norms_of

# Kinds of photos that planting has not seen: everyday, street, aerial, skin.
FOLDERS = ("seg_coco128/JPEGImages", "seg_camvid/images", "fs_rsscn7", "fs_ham10000")


def unseen(backbone: TimmBackbone, root: Path, size: tuple[int, int], count: int) -> torch.Tensor:
    """A few photos of every folder, fitted: (B, 3, H, W)."""
    paths = []
    for folder in FOLDERS:
        found = sorted(path for path in (root / folder).rglob("*") if path.suffix in (".jpg", ".png"))
        paths += found[:: len(found) // count][:count]
    return backbone.preprocess(paths, image_size=size)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.data
@pytest.mark.parametrize("kind", ["content", "position"])
@pytest.mark.parametrize(("size", "count"), [((224, 224), 5), ((518, 518), 1), ((224, 336), 2)])
def test_norms_find_the_planted_tokens_of_unseen_photos(
    kind: Kind, size: tuple[int, int], count: int, data_dir: Path
) -> None:
    planted, clean = demo_planted_backbone(kind), demo_backbone()
    images = unseen(planted, data_dir, size, count)
    truth = planted.planted.mask(images)
    assert 0.005 <= float(truth.float().mean()) <= 0.05
    assert float(truth.flatten(1).float().mean(1).max()) <= 0.1
    assert float(truth.flatten(1).any(1).float().mean()) >= 0.75
    block, last = planted.planted.block, planted.depth - 1
    ratios = outlier_norms_of(planted, images, (block - 1, block, last))
    assert float(ratios[block - 1].max()) < 3
    # a ramp has outliers of many lengths, and at its own block, where norms are small, also the faintest stand out
    least, judged = (3.5, (block, last)) if kind == "content" else (1.9, (last,))
    for found in (ratios[index] > least for index in judged):
        assert float((found & truth).sum() / truth.sum()) >= 0.95
        assert float((found & truth).sum() / found.sum()) >= 0.95
    assert float(ratios[last][truth].quantile(0.05)) >= (5 if kind == "content" else 2.5)
    assert float(ratios[last][truth].median()) >= 5
    assert float(outlier_norms_of(clean, images, (last,))[last].max()) < 2


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.data
@pytest.mark.parametrize("kind", ["content", "position"])
def test_the_other_patches_of_unseen_photos_stay_as_they_were(kind: Kind, data_dir: Path) -> None:
    planted, clean = demo_planted_backbone(kind), demo_backbone()
    images = unseen(planted, data_dir, (224, 224), 3)
    other = ~planted.planted.mask(images).flatten(1)
    with torch.inference_mode():
        alike = torch.cosine_similarity(planted(images).patches, clean(images).patches, dim=-1)
    assert float(alike[other].mean()) >= 0.95
    assert float(alike[~other].mean()) < 0.5


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.data
def test_content_moves_with_the_image_and_position_stays(data_dir: Path) -> None:
    content, position = demo_planted_backbone("content"), demo_planted_backbone("position")
    images = unseen(content, data_dir, (224, 224), 8)
    often = content.planted.mask(images).float().mean(0)
    assert float(often.max()) <= 0.3
    assert int((often > 0).sum()) >= 60
    assert float((position.planted.mask(images).float().mean(0) - 0.5).abs().min()) > 0.4


@pytest.mark.slow
@pytest.mark.weights
def test_the_second_time_nothing_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    state, metadata = demo_planted("content")
    monkeypatch.setattr(plant_models, "_plant_demo", lambda _kind: pytest.fail("the cache was not used"))
    again, same = demo_planted("content")
    assert same == metadata
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_crops_are_the_same_bits_and_every_photo_has_its_turn() -> None:
    pytest.importorskip("skimage")
    count = len(fit_photos())
    first, again, other = (photo_crops(count, (56, 84), seed) for seed in (3, 3, 4))
    assert [crop.size for crop in first] == [(84, 56)] * count
    assert [crop.tobytes() for crop in first] == [crop.tobytes() for crop in again]
    assert len({crop.tobytes() for crop in first + other}) == 2 * count


def test_missing_photos_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from regista.backbones import plant_photos

    monkeypatch.setattr(plant_photos, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"scikit-image.*astronaut.png.*pip install 'regista\[demo\]'"):
        fit_photos()
