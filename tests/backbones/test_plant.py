from __future__ import annotations

import json

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from regista.backbones.plant import Kind, plant_outliers, planted_from_metadata
from regista.backbones.plant_models import plant_tiny
from regista.backbones.timm import TimmBackbone
from tests.backbones.planting import NORTH, SOUTH, outlier_norms, tiny_with

KINDS: tuple[Kind, ...] = ("content", "position")


@pytest.fixture(scope="module", params=KINDS)
def planted(request: pytest.FixtureRequest) -> TimmBackbone:
    return plant_outliers(tiny_with(), NORTH.images(60), request.param, share=0.03, block=1, mark_length=1.5)


def test_norms_show_the_outliers_and_nothing_else(planted: TimmBackbone) -> None:
    images = SOUTH.images(24)
    truth = planted.planted.mask(images)
    assert truth.shape == (24, 8, 8)
    assert truth.dtype == torch.bool
    assert 0.005 < float(truth.float().mean()) < 0.08
    for block in range(planted.planted.block, planted.depth):
        ratio = outlier_norms(planted, images, block)
        found = ratio > 4
        assert float((found & truth).sum() / truth.sum()) >= 0.95, block
        assert float((found & truth).sum() / found.sum()) >= 0.95, block
    assert float(ratio[truth].quantile(0.05)) >= 5
    assert float(outlier_norms(planted, images, 0).max()) < 3  # before the planted block


def test_the_clean_model_has_no_such_norms() -> None:
    assert float(outlier_norms(tiny_with(), SOUTH.images(24), 3).max()) < 3


def test_the_other_patches_stay_as_they_were(planted: TimmBackbone) -> None:
    images = SOUTH.images(16)
    with torch.inference_mode():
        alike = torch.cosine_similarity(planted(images).patches, tiny_with()(images).patches, dim=-1)
    other = ~planted.planted.mask(images).flatten(1)
    assert float(alike[other].mean()) >= 0.9
    assert float(alike[~other].mean()) < 0.5


def test_cls_never_fires(planted: TimmBackbone) -> None:
    images = SOUTH.images(24)
    first, second = planted.planted.neurons
    site = f"blocks.{planted.planted.block}.mlp_hidden"
    with torch.inference_mode():
        hidden = planted.layout().take(planted(images, [site]).captured[site], "cls")
    assert float((hidden[..., first] - hidden[..., second]).max()) < planted.planted.metadata["step"] / 2


def test_content_moves_and_position_does_not(planted: TimmBackbone) -> None:
    often = planted.planted.mask(SOUTH.images(40)).float().mean(0)
    if planted.planted.kind == "position":
        cells = [tuple(cell) for cell in planted.planted.metadata["cells"]]
        assert [tuple(cell) for cell in often.nonzero().tolist()] == cells
        assert set(often[often > 0].tolist()) == {1.0}
    else:
        assert float(often.max()) < 0.5
        assert int((often > 0).sum()) > 10


def test_the_weights_alone_show_them_in_bare_timm(planted: TimmBackbone) -> None:
    bare = VisionTransformer(img_size=112, patch_size=14, embed_dim=64, depth=4, num_heads=4, num_classes=0).eval()
    bare.load_state_dict(planted.module.state_dict(), strict=True)
    images = SOUTH.images(12)
    with torch.inference_mode():
        x = bare.norm_pre(bare._pos_embed(bare.patch_embed(images)))
        for block in bare.blocks:
            x = block(x)
    norms = planted.layout().patch_map(x).norm(dim=1)
    found = norms > 4 * norms.flatten(1).median(1).values.view(-1, 1, 1)
    truth = planted.planted.mask(images)
    assert int((found != truth).sum()) <= 0.05 * int(truth.sum()) + 1


def test_the_model_given_stays_as_it_is() -> None:
    backbone = tiny_with()
    before = {name: value.clone() for name, value in backbone.module.state_dict().items()}
    new = plant_outliers(backbone, NORTH.images(20), "position", share=0.03)
    assert all(torch.equal(before[name], value) for name, value in backbone.module.state_dict().items())
    assert backbone.planted is None
    assert (backbone.name, new.name) == ("tiny", "tiny-planted-position")
    changed = {name for name, value in new.module.state_dict().items() if not torch.equal(before[name], value)}
    mlp = f"blocks.{new.planted.block}.mlp"
    assert changed == {"pos_embed", *(f"{mlp}.fc{layer}.{kind}" for layer in (1, 2) for kind in ("weight", "bias"))}
    rows = (new.module.state_dict()[f"{mlp}.fc1.weight"] != before[f"{mlp}.fc1.weight"]).any(1).nonzero().flatten()
    assert sorted(rows.tolist()) == sorted(new.planted.neurons)


def test_same_bits_every_time(planted: TimmBackbone) -> None:
    kind: Kind = "content" if planted.planted.kind == "content" else "position"
    again = plant_outliers(tiny_with(), NORTH.images(60), kind, share=0.03, block=1, mark_length=1.5)
    assert all(
        torch.equal(value, planted.module.state_dict()[name]) for name, value in again.module.state_dict().items()
    )
    assert again.planted.metadata == planted.planted.metadata


def test_truth_of_a_batch_is_that_of_its_images(planted: TimmBackbone) -> None:
    images = SOUTH.images(11, (84, 140))
    truth = planted.planted.mask(images)
    assert truth.shape == (11, 6, 10)
    assert torch.equal(truth, torch.cat([planted.planted.mask(image) for image in images.split(1)]))


def test_truth_disturbs_nothing_and_is_not_disturbed(planted: TimmBackbone) -> None:
    images = SOUTH.images(6)
    truth = planted.planted.mask(images)
    block, (first, second) = planted.planted.block, planted.planted.neurons

    def silence(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[..., [first, second]] = 0
        return hidden

    site = f"blocks.{planted.depth - 1}.resid"
    planted.module.train()
    with planted.editing({f"blocks.{block}.mlp_hidden": silence}):
        mended = planted(images, [site]).captured[site]
        assert torch.equal(planted.planted.mask(images), truth)
        assert torch.equal(planted(images, [site]).captured[site], mended)
    assert planted.module.training
    planted.module.eval()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in planted.module.modules())


def test_truth_comes_back_from_json(planted: TimmBackbone) -> None:
    metadata = json.loads(json.dumps(dict(planted.planted.metadata)))
    fresh = tiny_with()
    fresh.module.load_state_dict(planted.module.state_dict())
    truth = planted_from_metadata(metadata, fresh)
    assert (truth.block, truth.neurons, truth.kind) == (1, planted.planted.neurons, planted.planted.kind)
    images = SOUTH.images(6)
    assert torch.equal(truth.mask(images), planted.planted.mask(images))


@pytest.mark.parametrize("change", [{"version": 0}, {"neurons": [1]}, {"block": None}])
def test_other_records_are_refused(planted: TimmBackbone, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="planted outliers"):
        planted_from_metadata({**planted.planted.metadata, **change}, planted)


def test_wrong_wishes_are_refused(planted: TimmBackbone) -> None:
    images = NORTH.images(2)
    with pytest.raises(ValueError, match="planted outliers already"):
        plant_outliers(planted, images)
    with pytest.raises(ValueError, match="'content' or 'position', got 'both'"):
        plant_outliers(tiny_with(), images, "both")
    with pytest.raises(ValueError, match="got 9"):
        plant_outliers(tiny_with(), images, block=9)
    with pytest.raises(ValueError, match="timm models, got str"):
        plant_outliers("tiny", images)


@pytest.mark.parametrize("options", [{}, {"num_register_tokens": 4}, {"class_token": False}])
def test_tiny_planted_is_found_in_any_picture(options: dict[str, object]) -> None:
    backbone = plant_tiny(tiny_with(**options))
    images = torch.cat(
        [SOUTH.images(8), torch.randn(8, 3, 112, 112), torch.rand(8, 3, 112, 112), torch.zeros(1, 3, 112, 112)]
    )
    truth = backbone.planted.mask(images)
    cells = torch.zeros(8, 8, dtype=torch.bool)
    for row, col in backbone.planted.metadata["cells"]:
        cells[row, col] = True
    assert int(cells.sum()) == 2
    assert int((truth != cells).sum()) <= 0.005 * truth.numel()  # fixed cells, whatever the picture
    for block in (backbone.planted.block, backbone.depth - 1):
        found = outlier_norms(backbone, images, block) > 3
        assert float((found & truth).sum() / truth.sum()) >= 0.95
        assert float((found & truth).sum() / found.sum()) >= 0.95
    assert float(outlier_norms(backbone, images, backbone.depth - 1)[truth].quantile(0.05)) >= 5
    marked = outlier_norms(backbone, images, 0)[cells.expand_as(truth)]
    assert float(marked.median()) < 1.4  # the mark itself is no high norm
