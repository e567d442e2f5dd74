from __future__ import annotations

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from regista.backbones import plant_fit
from regista.backbones.plant_fit import TokenSample, content_trigger, mlp_inputs, position_trigger, sample_tokens
from tests.backbones.planting import NORTH, tiny_with


def test_mlp_inputs_are_the_tokens_after_the_second_norm() -> None:
    backbone = tiny_with()
    images = NORTH.images(5, (84, 70))
    ran: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, block in enumerate(backbone.vit.blocks)
    ]
    found = mlp_inputs(backbone, images, 2, batch_size=2)
    assert 3 not in ran  # later blocks do not run
    for handle in handles:
        handle.remove()
    captured = backbone(images, ["blocks.1.resid"]).captured["blocks.1.resid"]
    block = backbone.vit.blocks[2]
    with torch.no_grad():
        wanted = block.norm2(captured + block.attn(block.norm1(captured)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert not block.mlp.fc1._forward_pre_hooks


def test_direction_is_linear_discriminant_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant_fit, "RIDGE", 0.0)
    mixing = torch.randn(6, 6)
    labels = torch.arange(3000) % 5 == 0
    tokens = (torch.randn(3000, 6) + labels[:, None] * torch.tensor([1.5, 0, 0, -1, 0, 0])) @ mixing
    truth = labels.float()
    sample = TokenSample(tokens, torch.zeros(3000, dtype=torch.long), torch.zeros(3000), truth, torch.zeros(6, 6))
    found = position_trigger(sample).direction
    wanted = torch.tensor(LinearDiscriminantAnalysis(solver="lsqr").fit(tokens.numpy(), labels.numpy()).coef_[0])
    assert torch.cosine_similarity(found.double(), wanted.double(), dim=0) > 1 - 1e-4


def test_best_of_each_image_equals_a_loop() -> None:
    image = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 3, 25, 60]))
    score = torch.randn(98)
    found = plant_fit._top_of_each_image(score, image, 0.1)
    for index, count in enumerate((1, 1, 2, 6)):
        mine = score[image == index]
        assert set(score[found & (image == index)].tolist()) == set(mine.sort(descending=True).values[:count].tolist())


def test_information_rank_is_by_pixel_variance() -> None:
    images = torch.zeros(2, 3, 28, 42)
    scale = torch.tensor([[0.0, 5.0, 1.0, 3.0, 2.0, 4.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    checks = (torch.arange(14)[:, None] + torch.arange(14)) % 2 * 2.0 - 1
    for image in range(2):
        for cell in range(6):
            row, col = divmod(cell, 3)
            images[image, :, row * 14 : row * 14 + 14, col * 14 : col * 14 + 14] = checks * scale[image, cell] + 7
    torch.testing.assert_close(plant_fit._information_rank(images, 14), scale / 6)


def test_place_covariance_sees_only_the_place() -> None:
    place = torch.randn(30, 4)
    same_for_all = place + torch.zeros(50, 1, 1)
    torch.testing.assert_close(plant_fit._place_covariance(same_for_all).float(), torch.cov(place.T), rtol=0, atol=1e-5)
    noise = plant_fit._place_covariance(torch.randn(200, 30, 4))
    assert noise.abs().max() < 0.01  # a plain covariance of the means would be biased by 1 / 200


def test_content_trigger_fires_on_about_the_share_and_never_on_cls() -> None:
    backbone = tiny_with()
    sample = sample_tokens(backbone, [NORTH.images(40), NORTH.images(10, (84, 140))], 1)
    assert int((~sample.patches).sum()) == 50
    trigger = content_trigger(sample, 0.03)
    fires = sample.tokens @ trigger.direction > trigger.threshold
    assert float(fires[sample.patches].float().mean()) == pytest.approx(0.03, abs=0.002)
    assert not fires[~sample.patches].any()
    assert float(sample.rank[fires].mean()) < 0.4  # on patches of low information
    assert float((sample.tokens @ trigger.direction).std()) == pytest.approx(1.0, rel=1e-3)
