"""A constant key: what the contract of every adapter leaves out."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.attention_bias import AttentionBias
from regista.backbones.base import Backbone
from regista.backbones.live import from_module
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import tiny_vit
from tests.backbones.dinov2_module import ATTENTIONS
from tests.backbones.insertion_contract import with_constant_keys
from tests.backbones.naive_additions import constant_key
from tests.backbones.probes import close, pictures, randomise, unchanged
from tests.backbones.test_dinov2_hub import Dinov2HubBackbone, hub
from tests.backbones.test_torchvision import TorchvisionBackbone
from tests.backbones.test_torchvision import model as torchvision_model
from tests.backbones.test_transformers import MODELS, TransformersBackbone


def keys_for(backbone: Backbone, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, backbone.depth, backbone.num_heads, backbone.embed_dim // backbone.num_heads)
    keys, values = torch.randn(shape, generator=generator)
    return 2 * keys, values


def biased(backbone: Backbone, seed: int = 0) -> Any:
    new = copy.deepcopy(backbone)
    new.add(AttentionBias(*keys_for(backbone, seed)))
    return new


def unfused_timm() -> TimmBackbone:
    backbone = tiny_vit()
    for block in backbone.vit.blocks:
        block.attn.fused_attn = False
    return backbone


def eager() -> Any:
    module: Any = randomise(MODELS["dinov2"]())
    module.set_attn_implementation("eager")
    return TransformersBackbone(module, name="eager")


def by_hand() -> Any:
    return Dinov2HubBackbone(hub(attention="by hand"), name="hub")


# Modules whose attention the key cannot reach -----------------------------------------------


@pytest.mark.parametrize("make", [unfused_timm, eager, by_hand])
def test_unfused_attention_works_through_the_adapter_and_says_so_without(make: Any) -> None:
    backbone = make()
    new = biased(backbone)
    images = pictures(backbone, 2, backbone.image_size)
    with backbone.fused_attention(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", with_constant_keys(*keys_for(backbone)))
        wanted = backbone(images).tokens
    with unchanged(new.module):
        close(new(images).tokens, wanted, 1e-5)
    with pytest.raises(ValueError, match=r"did not go through scaled_dot_product_attention.*fused"), torch.no_grad():
        new.module(images)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("make", [tiny_vit, lambda: TorchvisionBackbone(torchvision_model(), name="torchvision")])
def test_an_error_inside_attention_is_the_users_own(make: Any) -> None:
    new = biased(make())
    sites, *_ = new.block_sites()

    class Broken(nn.Module):
        def forward(self, *_args: Any, **_options: Any) -> Tensor:
            raise KeyError("planted")

    part = "qkv" if hasattr(sites.attn, "qkv") else None
    if part is None:
        sites.attn.forward = Broken().forward
    else:
        sites.attn.qkv = Broken()
    with pytest.raises(KeyError, match="planted"):
        new(pictures(new))
    assert torch._C._len_torch_function_stack() == 0


def test_attention_of_another_kind_is_refused() -> None:
    mode = biased(tiny_vit())
    sites, *_ = mode.block_sites()

    class Causal(nn.Module):
        def forward(self, x: Tensor, *_args: Any, **_options: Any) -> Tensor:
            q = x.unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)

    sites.attn.forward = Causal().forward
    with pytest.raises(ValueError, match="causal or grouped-query"):
        mode(pictures(mode))


# Captures and edits beside it ---------------------------------------------------------------


def test_edits_beside_a_constant_key_are_heeded() -> None:
    new = biased(tiny_vit())
    images = pictures(new)
    plain = new(images).tokens
    for kind in ("q", "k", "v", "attn"):
        with new.editing({f"blocks.1.{kind}": torch.zeros_like}):
            features = new(images, [f"blocks.1.{kind}"])
        assert not features.captured[f"blocks.1.{kind}"].any()
        assert (features.tokens - plain).abs().max() > 1e-3, kind
        with new.editing({f"blocks.1.{kind}": torch.clone}):
            close(new(images).tokens, plain, 1e-5)


def test_edited_attention_leaves_the_constant_key_its_share() -> None:
    new = biased(tiny_vit())
    images, block = pictures(new), 1
    keys, values = (x.unbind(0)[block] for x in keys_for(new))
    seen: list[Tensor] = []
    last = new.block_sites()[block].attn
    last.proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad(), new.editing({f"blocks.{block}.attn": torch.zeros_like}):
        captured = new(images, [f"blocks.{block}.{kind}" for kind in "qkv"]).captured
    q, k, v = (captured[f"blocks.{block}.{kind}"] for kind in "qkv")
    shown, _ = constant_key(q, k, v, keys, values)
    share = 1 - shown.sum(-1, keepdim=True)  # (B, H, N, 1)
    close(seen.pop(), (share * values.unsqueeze(1)).transpose(1, 2).flatten(2), 1e-5)


def test_two_constant_keys() -> None:
    backbone = tiny_vit()
    new = biased(biased(backbone), seed=1)
    images = pictures(backbone)
    (first, second), (other, more) = keys_for(backbone), keys_for(backbone, 1)
    got = new(images, [f"blocks.0.{kind}" for kind in ("q", "k", "attn")]).captured
    q, k, attn = (got[f"blocks.0.{kind}"] for kind in ("q", "k", "attn"))
    scale = q.shape[-1] ** -0.5
    logits = torch.cat(
        [q @ k.mT, *(torch.einsum("bhqk,hk->bhq", q, x.unbind(0)[0]).unsqueeze(-1) for x in (first, other))], -1
    )
    close(attn, (logits * scale).softmax(-1).narrow(-1, 0, k.shape[2]), 1e-5)
    assert {"regista_attention_bias.keys", "regista_attention_bias_2.values"} <= set(new.module.state_dict())
    assert second.shape == more.shape
    close(from_module(new.module)(images).tokens, new(images).tokens, 1e-6)


def test_hidden_registers_beside_a_constant_key() -> None:
    backbone = tiny_vit()
    new = biased(backbone.with_registers(torch.randn(2, 64)))
    images = pictures(backbone)
    with new.hiding_registers():
        hidden = new(images)
    close(hidden.patches, biased(backbone)(images).patches, 1e-5)
    wanted = new.with_registers(torch.randn(1, 64))
    assert wanted.num_register_tokens == 3
    assert wanted(images).registers.shape == (2, 3, 64)


def test_dropout_of_attention_stays_in_training() -> None:
    module = torchvision_model(attention_dropout=0.5)
    for backbone in (TorchvisionBackbone(module, name="plain"), biased(TorchvisionBackbone(module, name="biased"))):
        images = pictures(backbone)
        assert torch.equal(backbone(images).tokens, backbone(images).tokens)
        backbone.module.train()
        backbone.training = True
        assert not torch.equal(backbone(images).tokens, backbone(images).tokens)
        captured = [backbone(images, ["blocks.0.attn"]).tokens for _ in range(2)]
        assert not torch.equal(*captured)


# It goes where the module goes --------------------------------------------------------------


def test_it_travels_with_the_module() -> None:
    new = biased(tiny_vit())
    images = pictures(new, 2, new.image_size)
    stored = io.BytesIO()
    torch.save(new.module, stored)
    stored.seek(0)
    wanted = new(images).tokens
    for module in (new.module, copy.deepcopy(new.module), torch.load(stored, weights_only=False)):
        with torch.no_grad():
            close(module.forward_features(images), wanted, 1e-6)
        assert torch.equal(from_module(module)(images).tokens, wanted)
    close(new.to(dtype=torch.float64)(images).tokens, wanted, 1e-4)
    assert new.to(dtype=torch.bfloat16)(images).tokens.dtype == torch.bfloat16


def test_a_dinov2_takes_it_along_when_it_gets_registers() -> None:
    backbone = TransformersBackbone(randomise(MODELS["dinov2"]()), name="dinov2")
    keys, values = keys_for(backbone)
    new = copy.deepcopy(backbone)
    new.add(RegisterNeurons({1: [3, 4]}, prefix_segments(new.layout()), 0))
    new.add(AttentionBias(keys, values))
    images = pictures(backbone)
    registered = new.with_registers(torch.randn(2, backbone.embed_dim))
    assert [addition.kind for addition in registered.additions] == ["register-neurons", "attention-bias"]
    assert set(registered.additions).isdisjoint(new.additions)
    with registered.hiding_registers():
        hidden = registered(images)
    plain = new(images)
    close(hidden.patches, plain.patches, 1e-5)
    close(hidden.cls, plain.cls, 1e-5)
    assert (plain.patches - backbone(images).patches).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["timm", "torchvision"])
def test_a_compiled_model_is_not_silently_without(kind: str) -> None:
    if kind == "timm":
        module: Any = timm.create_model("vit_small_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3)
        backbone: Any = TimmBackbone(randomise(module), name="timm")
    else:
        backbone = TorchvisionBackbone(torchvision_model("patch 16", num_classes=7), name="torchvision")
        nn.init.normal_(backbone.module.heads.head.weight)
    new = biased(backbone)
    images = pictures(new, 2, new.image_size)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted, plain = new.module.eval()(images), backbone.module.eval()(images)
        assert (wanted - plain).abs().max() > 1e-3
        close(torch.compile(new.module, backend="eager")(images), wanted, 1e-5)
    torch._dynamo.reset()


def test_every_attention_of_the_hub_is_reached() -> None:
    for attention in ATTENTIONS:
        backbone = Dinov2HubBackbone(hub(attention=attention), name=attention)
        images = pictures(backbone)
        assert (biased(backbone)(images).tokens - backbone(images).tokens).abs().max() > 1e-3
