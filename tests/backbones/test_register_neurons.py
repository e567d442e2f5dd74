"""Register neurons: what the contract of every adapter leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from regista.backbones.timm import TimmBackbone
from regista.backbones.tiny import tiny_vit
from regista.tokens import Segment, TokenLayout
from tests.backbones.naive_additions import moved
from tests.backbones.probes import close, pictures, randomise, unchanged

GRID = (2, 3)
LAYOUTS = {
    "cls and one": (("cls", 1), ("registers", 1)),
    "cls and four": (("cls", 1), ("registers", 4)),
    "registers only": (("registers", 3),),
    "with another token": (("cls", 1), ("extra", 1), ("registers", 2)),
    "registers first": (("registers", 2), ("cls", 1)),
}


def layout_of(segments: tuple[tuple[str, int], ...]) -> TokenLayout:
    return TokenLayout((*(Segment(*pair) for pair in segments), Segment("patches", 6)), GRID, 14)


def with_neurons(backbone: Backbone, neurons: dict[int, Any], count: int = 1, **options: Any) -> Any:
    cured = backbone.with_registers(torch.zeros(count, backbone.embed_dim))
    cured.add(RegisterNeurons(neurons, prefix_segments(cured.layout()), count, **options))
    return cured


def swiglu() -> TimmBackbone:
    module = timm.create_model(
        "vit_giant_patch14_reg4_dinov2", img_size=56, depth=3, embed_dim=48, num_heads=3, num_classes=0
    )
    return TimmBackbone(randomise(module), name="swiglu")


# The edit itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("receiving", [0, 1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_edit_is_the_naive_loop(name: str, receiving: int, variant: Any) -> None:
    segments = LAYOUTS[name]
    receiving = min(receiving, dict(segments)["registers"])
    hidden = torch.randn(3, layout_of(segments).num_tokens, 11)
    hidden[1] -= 3  # the largest magnitude is negative here
    neurons = RegisterNeurons({2: [7, 0, 4]}, segments, receiving, variant)
    before = hidden.clone()
    got = neurons.edit(2, hidden)
    assert torch.equal(hidden, before)
    close(got, moved(hidden, layout_of(segments), (7, 0, 4), receiving, variant), 1e-6)


def test_only_the_last_registers_receive_and_all_else_is_silent() -> None:
    segments = LAYOUTS["cls and four"]
    layout = layout_of(segments)
    hidden = torch.rand(2, layout.num_tokens, 5) + 1
    parts = layout.split(RegisterNeurons({0: [3]}, segments, 2).edit(0, hidden))
    assert all(not parts[name].select(-1, 3).any() for name in ("cls", "patches"))
    kept, received = parts["registers"].select(-1, 3).split(2, -1)
    assert not kept.any()
    close(received, hidden.select(-1, 3).amax(-1, keepdim=True).expand(-1, 2), 0)
    others = torch.tensor([0, 1, 2, 4])
    assert torch.equal(layout.join(parts).index_select(-1, others), hidden.index_select(-1, others))


def test_every_unit_has_its_own_value_in_the_paper_and_shares_it_in_the_released_code() -> None:
    segments = LAYOUTS["cls and one"]
    layout = layout_of(segments)
    hidden = torch.zeros(1, layout.num_tokens, 3)
    peaks = {0: 0.649, 1: -0.746, 2: 0.309}
    for unit, peak in peaks.items():
        hidden.select(-1, unit).select(-1, layout.slice("patches").start + unit).fill_(peak)
    for variant, wanted in (("paper", [0.649, -0.746, 0.309]), ("released", [-0.746] * 3)):
        edited = RegisterNeurons({0: [0, 1, 2]}, segments, 1, variant).edit(0, hidden)  # type: ignore[arg-type]
        assert layout.take(edited, "registers").flatten().tolist() == pytest.approx(wanted)


def test_the_grid_may_have_any_size() -> None:
    cured = with_neurons(tiny_vit(), {1: [0, 9]}, 2)
    for size in ((14, 14), (28, 70), (112, 112)):
        layout = cured.layout(size)
        site = "blocks.1.mlp_hidden"
        captured = cured(pictures(cured, 2, size), [site]).captured[site]
        chosen = captured.index_select(-1, torch.tensor([0, 9]))
        assert not layout.take(chosen, "patches").any()
        assert layout.take(chosen, "registers").abs().min() > 0


# In a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_vit, swiglu])
def test_no_neurons_and_a_hidden_register_leave_the_original(make: Any) -> None:
    backbone = make()
    cured = with_neurons(backbone, {})
    images = pictures(backbone)
    plain = backbone(images)
    with cured.hiding_registers(keep=backbone.num_register_tokens):
        hidden = cured(images)
    close(hidden.patches, plain.patches, 1e-5)
    close(hidden.cls, plain.cls, 1e-5)
    assert (cured(images).patches - plain.patches).abs().max() > 1e-4
    assert sum(len(part._forward_pre_hooks) for part in cured.module.modules()) == 0


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("make", [tiny_vit, swiglu])
def test_what_the_user_holds_is_not_changed(make: Any, inference: bool) -> None:
    """An MLP's activations may be held by a hook of the user, before the last layer takes them."""
    backbone = make()
    held: list[Tensor] = []
    first, *_ = backbone.block_sites()
    first.mlp_out.register_forward_pre_hook(lambda _module, args: held.append(args[0]))
    with torch.inference_mode(inference):
        images = pictures(backbone)
        with_neurons(backbone, {})(images)
        with_neurons(backbone, {0: [0, 1, 2]})(images)
    untouched, again = held
    assert torch.equal(again, untouched)


def test_captured_activations_are_not_changed_afterwards() -> None:
    cured = with_neurons(with_neurons(tiny_vit(), {1: [3]}), {1: [4], 2: [5]})
    images = pictures(cured)
    with torch.inference_mode():
        wanted = {site: value.clone() for site, value in cured(images, ["blocks.1.mlp_hidden"]).captured.items()}
        together = cured(images, cured.sites()).captured
    for site, value in wanted.items():
        close(together[site], value, 1e-6)


@pytest.mark.parametrize("make", [tiny_vit, swiglu])
def test_gradients_are_those_of_the_naive_loop(make: Any) -> None:
    backbone = make()
    plain = backbone.with_registers(torch.zeros(1, backbone.embed_dim))
    cured = with_neurons(backbone, {1: [2, 6]})
    images = pictures(backbone)
    layout = plain.layout((images.shape[-2], images.shape[-1]))
    units = torch.tensor([2, 6])

    def edit(hidden: Tensor) -> Tensor:
        chosen = hidden[..., units]
        picked = chosen.gather(1, chosen.abs().argmax(1, keepdim=True))
        parts = {name: part * 0 for name, part in layout.split(chosen).items()}
        old = parts["registers"].split([layout.num_register_tokens - 1, 1], 1)
        parts["registers"] = torch.cat([next(iter(old)), picked], 1)
        rest = torch.ones(hidden.shape[-1]).index_fill(0, units, 0)
        return hidden * rest + torch.zeros_like(hidden).index_add(-1, units, layout.join(parts))

    cured(images).patches.square().mean().backward()
    with plain.editing({"blocks.1.mlp_hidden": edit}):
        plain(images).patches.square().mean().backward()
    wanted = dict(plain.module.named_parameters())
    for name, parameter in cured.module.named_parameters():
        close(parameter.grad, wanted[name].grad, 1e-5)


def test_fixing_twice_keeps_both() -> None:
    backbone = tiny_vit()
    once = with_neurons(backbone, {1: [3, 8]})
    twice = with_neurons(once, {2: [1]}, 2)
    assert [addition.neurons for addition in twice.additions] == [{1: (3, 8)}, {2: (1,)}]
    assert len(once.additions) == 1
    assert {key for key in twice.module.state_dict() if "regista" in key} == {
        "regista_register_neurons.block_1",
        "regista_register_neurons_2.block_2",
    }
    site_1, site_2 = "blocks.1.mlp_hidden", "blocks.2.mlp_hidden"
    plain = backbone.with_registers(torch.zeros(3, backbone.embed_dim))
    images = pictures(backbone)
    layout = plain.layout((images.shape[-2], images.shape[-1]))

    def first(hidden: Tensor) -> Tensor:  # the later registers are silenced like patches
        kinds = layout.split(moved(hidden, layout, (3, 8), 0, "paper"))
        one = moved(hidden, layout, (3, 8), 3, "paper")
        received = layout.take(one, "registers").narrow(1, 0, 1)
        kinds["registers"] = torch.cat([received, kinds["registers"].narrow(1, 1, 2)], 1)
        return layout.join(kinds)

    with torch.no_grad(), plain.editing({site_1: first, site_2: lambda x: moved(x, layout, (1,), 2, "paper")}):
        wanted = plain(images)
    close(twice(images).tokens, wanted.tokens, 1e-5)
    assert copy.deepcopy(twice)(images).tokens.equal(twice(images).tokens)


def test_the_original_is_untouched() -> None:
    backbone = tiny_vit()
    with unchanged(backbone.module):
        with_neurons(backbone, {0: [1]})(pictures(backbone))


# Mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("neurons", "message"),
    [
        ({9: [0]}, "blocks 0 to 3, got 9"),
        ({-1: [0]}, "blocks 0 to 3, got -1"),
        ({1: [256]}, r"units 0 to 255, got \[256\]"),
        ({1: [3, -2]}, r"units 0 to 255, got \[-2\]"),
    ],
)
def test_neurons_that_are_not_there_are_refused(neurons: dict[int, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_neurons(tiny_vit(), neurons)


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="'paper' or 'released', got 'mine'"):
        RegisterNeurons({0: [1]}, [("cls", 1), ("registers", 1)], 1, "mine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 registers cannot receive where there are 1"):
        RegisterNeurons({0: [1]}, [("cls", 1), ("registers", 1)], 2)
    with pytest.raises(ValueError, match="patches at the end"):
        prefix_segments(TokenLayout.of(GRID, 14, num_register_tokens=2, order=("cls", "patches", "registers")))
