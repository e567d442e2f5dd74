"""Inserted registers in what surrounds the tokens: heads, pooling, text towers, compilation, checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import regista
from regista.backbones.base import Backbone
from regista.backbones.dinov2_hub import Dinov2HubBackbone
from regista.backbones.inserted_registers import InsertedRegisters
from regista.backbones.timm import TimmBackbone, fold_prefix_positions
from regista.backbones.torchvision import TorchvisionBackbone
from tests.backbones.insertion_contract import add_neurons, new_registers
from tests.backbones.probes import close, pictures, randomise
from tests.backbones.test_dinov2_hub import hub
from tests.backbones.test_open_clip import OpenClipBackbone, adapters, timm_tower
from tests.backbones.test_open_clip import model as open_clip_model
from tests.backbones.test_transformers import MODELS, TransformersBackbone

SMALL: dict[str, Any] = {"img_size": 56, "patch_size": 14, "embed_dim": 48, "depth": 3, "num_heads": 3}


def plain(**options: Any) -> TimmBackbone:
    module = randomise(timm.models.VisionTransformer(**{**SMALL, "num_classes": 5, **options}))
    return TimmBackbone(module, name="plain")


def torchvision_backbone() -> TorchvisionBackbone:
    options = {"num_layers": 2, "num_heads": 2, "hidden_dim": 48, "mlp_dim": 96, "num_classes": 5}
    module: Any = torchvision.models.VisionTransformer(image_size=56, patch_size=14, **options)
    nn.init.normal_(module.heads.head.weight)
    return TorchvisionBackbone(randomise(module), name="torchvision")


def of_transformers(kind: str) -> Any:
    return TransformersBackbone(randomise(MODELS[kind](), scale=0.5), name=kind)


def cured(backbone: Backbone, count: int = 2) -> Any:
    return backbone.with_registers(new_registers(backbone, count))


# Positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}])
def test_folding_prefix_positions_changes_no_bit(options: dict[str, Any]) -> None:
    backbone = plain(**options)
    folded = copy.deepcopy(backbone)
    fold_prefix_positions(folded.vit)
    assert folded.vit.no_embed_class
    assert folded.vit.pos_embed.shape[1] == 16
    for size in ((56, 56), (70, 42)):
        images = pictures(backbone, 2, size)
        assert torch.equal(folded(images).tokens, backbone(images).tokens)


def test_frozen_weights_stay_frozen_and_registers_learn() -> None:
    for backbone in (plain(reg_tokens=1), of_transformers("dinov2"), of_transformers("clip"), torchvision_backbone()):
        backbone.module.requires_grad_(False)
        with_registers = cured(backbone)
        learning = [value for value in with_registers.module.parameters() if value.requires_grad]
        assert len(learning) == 1
        assert learning.pop() is with_registers.register_table()


def test_hidden_registers_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="0 or more, got -1"):
        plain().hiding_registers(keep=-1).__enter__()


# Pooling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "max"},
        {"global_pool": "map", "class_token": False},
        {"global_pool": "token"},
    ],
)
def test_timms_pooling_leaves_registers_out(options: dict[str, Any]) -> None:
    backbone = cured(plain(**options))
    features = backbone(pictures(backbone, 2, backbone.image_size))
    noise = {**features.layout.split(features.tokens), "registers": 50 * torch.randn_like(features.registers)}
    with torch.no_grad():
        wanted = backbone.vit.forward_head(features.tokens)
        close(backbone.vit.forward_head(features.layout.join(noise)), wanted, 1e-6)
        close(backbone.vit(pictures(backbone, 2, backbone.image_size)), wanted, 1e-6)


@pytest.mark.parametrize("kind", ["siglip", "siglip vision"])
def test_siglips_pooling_head_does_not_see_them(kind: str) -> None:
    backbone = cured(of_transformers(kind))
    images = pictures(backbone, 2, backbone.image_size)
    features = backbone(images, ["pool.attn"])
    assert features.captured["pool.attn"].shape[-1] == features.layout.num_patches
    tokens, layout = features.layout.remove_registers(features.tokens)
    head = copy.deepcopy(backbone.vit.head)
    head._forward_pre_hooks.clear()
    with torch.no_grad():
        wanted = head(tokens)
        close(backbone.vit(pixel_values=images).pooler_output, wanted, 1e-6)
    close(backbone.global_vector(features.tokens, features.layout), wanted, 1e-6)
    assert layout.num_register_tokens == 0


def test_heads_of_the_library_see_the_registers_effect_only() -> None:
    for backbone in (torchvision_backbone(), of_transformers("vit classifier")):
        images = pictures(backbone, 2, backbone.image_size)
        new = cured(backbone)
        whole = getattr(new, "full_model", new.module)
        with torch.no_grad():
            got = whole(images)
            head = whole.heads if hasattr(whole, "heads") else whole.classifier
            close(getattr(got, "logits", got), head(new(images).cls), 1e-5)


def test_transformers_register_classifier_averages_patches_only() -> None:
    backbone = cured(of_transformers("registers classifier"), 3)
    images = pictures(backbone, 2, backbone.image_size)
    features = backbone(images)
    with torch.no_grad():
        wanted = backbone.full_model.classifier(torch.cat([features.cls, features.patches.mean(1)], 1))
        close(backbone.full_model(images).logits, wanted, 1e-5)


@pytest.mark.parametrize("kind", ["dinov2 classifier", "clip classifier", "siglip classifier"])
def test_classifiers_that_would_average_registers_are_left_behind(kind: str) -> None:
    original = of_transformers(kind)
    backbone = cured(original)
    assert backbone.full_model is backbone.module
    assert any("left behind" in note for note in backbone.notes)
    assert original.notes == []
    assert type(original.full_model).__name__.endswith("ForImageClassification")


# Models of image and text ------------------------------------------------------------------


def test_image_embeddings_of_the_whole_model_have_the_registers() -> None:
    tower = open_clip_model()
    backbone = OpenClipBackbone(tower, name="clip")
    images, tokens = pictures(backbone, 2, backbone.image_size), torch.randint(0, 64, (3, 8))
    new = cured(backbone)
    with torch.no_grad():
        embedded = new.full_model.encode_image(images)
        close(embedded, new.image_embedding(new(images)), 1e-5)
        assert (embedded - tower.encode_image(images)).abs().max() > 1e-3
        assert torch.equal(new.encode_text(tokens), tower.encode_text(tokens))


def test_timm_towers_inside_open_clip_take_them() -> None:
    backbone = adapters.open_clip_backbone(timm_tower("test_vit3", "map", "mlp"), "siglip")
    new = cured(backbone)
    images = pictures(new, 2, new.image_size)
    assert new.num_register_tokens == backbone.num_register_tokens + 2
    with torch.no_grad():
        close(new.full_model.encode_image(images), new.image_embedding(new(images)), 1e-5)
    assert new.vit is new.full_model.visual.trunk


# Places that do not exist ------------------------------------------------------------------


def first_generation() -> Any:
    module = hub("no registers")
    del module.register_tokens
    return Dinov2HubBackbone(module, name="first")


def distilled() -> Any:
    module = timm.create_model("deit_small_distilled_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=3)
    return TimmBackbone(module, name="distilled")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (distilled, "distilled models have no place for registers"),
        (lambda: OpenClipBackbone(open_clip_model("mean"), name="mean"), "registers have no place"),
        (lambda: OpenClipBackbone(open_clip_model("attention pooling"), name="coca"), "registers have no place"),
        (first_generation, "knows no registers; take a newer one"),
    ],
)
def test_models_without_a_place_say_so(make: Any, message: str) -> None:
    backbone = make()
    with pytest.raises(ValueError, match=message):
        cured(backbone)
    assert backbone.with_registers(torch.zeros(0, backbone.embed_dim)).num_register_tokens == 0


# One hook, many users ----------------------------------------------------------------------


def test_one_addition_however_often_registers_are_inserted() -> None:
    backbone = cured(cured(cured(torchvision_backbone())))
    assert [type(addition) for addition in backbone.additions] == [InsertedRegisters]
    assert backbone.num_register_tokens == backbone.additions[0].num_register_tokens == 6
    assert backbone(pictures(backbone)).registers.shape == (2, 6, 48)
    assert "no place" in str(backbone.needs_regista)


@pytest.mark.parametrize("make", [plain, torchvision_backbone, lambda: of_transformers("vit")])
def test_the_users_own_hooks_go_along(make: Any) -> None:
    backbone = make()
    first, *_ = backbone.block_sites()
    lengths: list[int] = []
    first.block.register_forward_hook(lambda _module, _args, output: lengths.append(output.shape[1]))
    new = cured(backbone)
    new(pictures(new))
    assert lengths == [30 + backbone.num_cls_tokens + 2]


def test_a_live_cured_model_is_read_as_cured() -> None:
    new = cured(torchvision_backbone())
    new.module.eval()
    images = pictures(new, 2, new.image_size)
    again = regista.load(new.module)
    assert again.num_register_tokens == 2
    assert again.additions == new.additions
    with torch.no_grad():
        logits = new.module(images)
        close(again.module.heads(again(images).cls), logits, 1e-5)


# Compiled, checkpointed --------------------------------------------------------------------


def compiled_backbones() -> dict[str, Any]:
    return {"timm": plain(num_classes=0), "torchvision": torchvision_backbone(), "clip": of_transformers("clip vision")}


@pytest.mark.parametrize("kind", compiled_backbones())
def test_a_compiled_model_is_still_cured(kind: str) -> None:
    backbone = compiled_backbones()[kind]
    new = cured(backbone)
    add_neurons(new, num_test_time=1)
    images = pictures(new, 2, new.image_size)
    torch._dynamo.reset()
    compiled = torch.compile(new.module.eval(), backend="eager")
    with torch.no_grad():
        got, wanted, sick = (pooled(module(images)) for module in (compiled, new.module, backbone.module.eval()))
        close(got, wanted, 1e-5)
        assert (wanted - sick).abs().max() > 1e-3
        others = pictures(new, 3, new.image_size, seed=1)
        close(pooled(compiled(others)), pooled(new.module(others)), 1e-5)
    assert regista.load(compiled).num_register_tokens == 2
    torch._dynamo.reset()


def pooled(output: Any) -> Tensor:
    found: Tensor = getattr(output, "pooler_output", output)
    return found


@pytest.mark.parametrize("make", [plain, lambda: of_transformers("clip vision")])
def test_gradients_under_checkpointing_are_the_same(make: Any) -> None:
    new = cured(make())
    add_neurons(new, num_test_time=1)
    new.training = True
    new.module.train()
    images = pictures(new)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing and hasattr(new.module, "set_grad_checkpointing"):
            new.module.set_grad_checkpointing(True)
        elif checkpointing:
            new.module.gradient_checkpointing_enable({"use_reentrant": False})
        new.module.zero_grad()
        new(images).patches.square().mean().backward()
        gradients.append([value.grad.clone() for value in new.module.parameters() if value.grad is not None])
    without, with_checkpoints = gradients
    assert len(without) == len(with_checkpoints) > 10
    for got, wanted in zip(with_checkpoints, without, strict=True):
        close(got, wanted, 1e-5)
