"""Outlier tokens replaced inside the models of every library, against loops over cells."""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regista
from regista.backbones.additions import add_from_records
from regista.backbones.base import Backbone
from regista.backbones.neighbour_repair import DirectionRule, NeighbourRepair, NormRule
from regista.backbones.tiny import tiny_vit
from tests.backbones.naive_repair import averaged, smoothed
from tests.backbones.probes import close, pictures, randomise

BLOCK = 1
SITE = f"blocks.{BLOCK}.resid"


def other(file: str, call: Callable[[Any], Any]) -> Callable[[], Backbone]:
    return lambda: regista.load(randomise(call(importlib.import_module(f"tests.backbones.{file}"))))


def headless(module: Any) -> Any:
    module.heads = torch.nn.Identity()  # torchvision's starts at zero
    return module


MODELS: dict[str, Callable[[], Backbone]] = {
    "timm": lambda: tiny_vit(num_register_tokens=4),
    "timm without CLS": lambda: tiny_vit(class_token=False, patch_size=16),
    "timm dinov3": other("test_timm", lambda tests: tests.named("vit_small_patch16_dinov3", img_size=64)()),
    "hub": other("test_dinov2_hub", lambda tests: tests.hub("four registers")),
    "hf dinov2": other("test_transformers", lambda tests: tests.MODELS["dinov2"]()),
    "hf clip": other("test_transformers", lambda tests: tests.MODELS["clip"]()),
    "hf siglip": other("test_transformers", lambda tests: tests.MODELS["siglip"]()),
    "open_clip": other("test_open_clip", lambda tests: tests.model("plain")),
    "open_clip sequence first": other("test_open_clip", lambda tests: tests.model("sequence first")),
    "torchvision": other("test_torchvision", lambda tests: headless(tests.model("patch 14"))),
}


def before(backbone: Backbone, images: Tensor, block: int = BLOCK) -> tuple[Tensor, Any]:
    """Tokens after the block, and their layout."""
    site = f"blocks.{block}.resid"
    with torch.no_grad():
        features = backbone(images, capture=site)
    return features.captured[site], features.layout


def cutoff_for(backbone: Backbone, images: Tensor, block: int = BLOCK) -> float:
    """A norm that 15 % of the patches exceed."""
    tokens, layout = before(backbone, images, block)
    ordered = layout.take(tokens, "patches").norm(dim=-1).flatten().sort(descending=True).values
    place = int(0.15 * len(ordered))
    return float((ordered[place - 1] + ordered[place]) / 2)


def with_rule(backbone: Backbone, rule: Any, block: int = BLOCK) -> Backbone:
    repaired = copy.deepcopy(backbone)
    repaired.add(NeighbourRepair(block, rule))
    return repaired


def check_norm_rule(backbone: Backbone, repaired: Backbone, images: Tensor, cutoff: float) -> None:
    tokens, layout = before(backbone, images)
    got, _ = before(repaired, images)
    parts, wanted = layout.split(got), layout.split(tokens)
    for name in ("cls", "registers"):
        assert torch.equal(parts[name], wanted[name])
    changed = 0
    for image in range(len(images)):
        grid = wanted["patches"][image].unflatten(0, layout.grid_size)
        new = parts["patches"][image].unflatten(0, layout.grid_size)
        close(new, averaged(grid, cutoff), 1e-5)
        fine = grid.norm(dim=-1) <= cutoff
        assert torch.equal(new[fine], grid[fine])
        changed += int((~fine).sum())
    assert changed


# In every library --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_outliers_become_the_mean_of_their_neighbours(name: str) -> None:
    backbone = MODELS[name]()
    images = pictures(backbone, 3)  # not square
    cutoff = cutoff_for(backbone, images)
    repaired = with_rule(backbone, NormRule(cutoff))
    check_norm_rule(backbone, repaired, images, cutoff)
    with torch.no_grad():
        together = repaired(images).tokens
        assert (together - backbone(images).tokens).abs().max() > 1e-3
        close(together, torch.cat([repaired(image).tokens for image in images.split(1)]), 1e-5)
        assert repaired.needs_regista == "its outlier tokens are replaced by a hook"
        assert backbone.needs_regista is None


@pytest.mark.parametrize("name", ["timm", "hf clip", "open_clip sequence first", "torchvision"])
def test_the_bare_module_does_it_too(name: str) -> None:
    backbone = MODELS[name]()
    images = pictures(backbone, 3, size=backbone.image_size)
    repaired = with_rule(backbone, NormRule(cutoff_for(backbone, images, 0)), 0)
    with torch.no_grad():
        got = output(repaired, images)
        assert (got - output(backbone, images)).abs().max() > 1e-3
        close(got, torch.cat([output(repaired, image) for image in images.split(1)]), 1e-5)


def output(backbone: Backbone, images: Tensor) -> Tensor:
    """What the module itself gives."""
    out: Any = backbone.module(images)
    return out if isinstance(out, Tensor) else out.pooler_output


@pytest.mark.parametrize("name", MODELS)
def test_without_outliers_every_bit_stays(name: str) -> None:
    backbone = MODELS[name]()
    images = pictures(backbone)
    with torch.no_grad():
        assert torch.equal(with_rule(backbone, NormRule(1e6))(images).tokens, backbone(images).tokens)


def test_an_image_without_outliers_keeps_its_bits_beside_one_that_has_some() -> None:
    backbone = tiny_vit()
    images = pictures(backbone, 2)
    tokens, layout = before(backbone, images)
    highest = layout.take(tokens, "patches").norm(dim=-1).amax(-1)
    got, _ = before(with_rule(backbone, NormRule(float(highest.mean()))), images)
    kept, changed = int(highest.argmin()), int(highest.argmax())
    assert torch.equal(got[kept], tokens[kept])
    assert not torch.equal(got[changed], tokens[changed])


# Which grid --------------------------------------------------------------------------------


def test_a_call_inside_a_call_has_its_own_grid() -> None:
    """Both grids have as many cells, so a mix-up would go unnoticed by counting."""
    backbone = tiny_vit()
    torch.nn.init.zeros_(backbone.module.pos_embed)  # type: ignore[arg-type]  the same at every size
    wide, high = (pictures(backbone, 2, size=size) for size in ((4 * 14, 6 * 14), (6 * 14, 4 * 14)))
    repaired = with_rule(backbone, NormRule(cutoff_for(backbone, wide)), BLOCK)
    with torch.no_grad():
        wanted = repaired(wide).tokens, repaired(high).tokens
        inner: list[Tensor] = []

        def call_again(tokens: Tensor) -> Tensor:
            if not inner:
                inner.append(torch.empty(0))
                inner.append(repaired(high).tokens)
            return tokens

        outer = repaired(wide, {"blocks.0.resid": call_again}).tokens
    assert torch.equal(outer, wanted[0])
    assert torch.equal(inner[1], wanted[1])


def test_a_call_that_was_broken_off_leaves_no_trace() -> None:
    backbone = tiny_vit()
    wide, high = (pictures(backbone, 2, size=size) for size in ((4 * 14, 6 * 14), (6 * 14, 4 * 14)))
    repaired = with_rule(backbone, NormRule(cutoff_for(backbone, wide)))

    def stop(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with torch.no_grad():
        wanted = repaired(wide).tokens
        for _ in range(40):
            with pytest.raises(KeyboardInterrupt):
                repaired(high, {"blocks.0.resid": stop})
        assert torch.equal(repaired(wide).tokens, wanted)
    (addition,) = repaired.additions
    assert isinstance(addition, NeighbourRepair)
    assert sum(map(len, addition._pending.values())) <= 16


def test_threads_do_not_share_a_grid() -> None:
    backbone = tiny_vit()
    addition = NeighbourRepair(BLOCK, NormRule(3.0))
    tokens = torch.randn(1, 24, backbone.embed_dim)
    tokens[0, 9] *= 9
    embedded, done = threading.Event(), threading.Event()

    def another() -> None:
        addition.embed(backbone.module, (), torch.zeros(1, 1, 6, 4))
        embedded.set()
        done.wait(10)

    thread = threading.Thread(target=another)
    addition.embed(backbone.module, (), torch.zeros(1, 1, 4, 6))
    thread.start()
    embedded.wait(10)
    got = addition.repair(tokens)
    done.set()
    thread.join()
    close(got.unflatten(1, (4, 6))[0], averaged(tokens.unflatten(1, (4, 6))[0], 3.0), 1e-5)


def test_registers_that_come_later_are_no_patches() -> None:
    backbone = tiny_vit()
    images = pictures(backbone, 3)
    registers = torch.randn(2, backbone.embed_dim)
    cutoff = cutoff_for(backbone.with_registers(registers), images)
    check_norm_rule(
        backbone.with_registers(registers),
        with_rule(backbone, NormRule(cutoff)).with_registers(registers),
        images,
        cutoff,
    )


def test_outputs_that_are_tuples() -> None:
    backbone = tiny_vit()
    images = pictures(backbone, 3)
    cutoff = cutoff_for(backbone, images)
    wrapped = copy.deepcopy(backbone)
    block = wrapped.block_sites()[BLOCK].block
    block.register_forward_hook(lambda _module, _args, output: (output, "more"))
    wrapped.add(NeighbourRepair(BLOCK, NormRule(cutoff)))

    def unwrap(_module: Any, _args: Any, output: Any) -> Any:
        tokens, more = output
        assert more == "more"
        return tokens

    block.register_forward_hook(unwrap)
    check_norm_rule(backbone, wrapped, images, cutoff)


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_computed_twice_in_training(reentrant: bool) -> None:
    backbone = tiny_vit(class_token=False)
    images = pictures(backbone, 2)
    repaired = with_rule(backbone, NormRule(6.0))
    gradients = []
    for twice in (False, True):
        model: Any = copy.deepcopy(repaired).module
        with repaired.prepared((images.shape[-2], images.shape[-1])):
            embedded = repaired.module.patch_embed(images)  # type: ignore[operator]
        tokens = embedded.flatten(1, 2).detach().requires_grad_()
        model.patch_embed.proj(images)  # where a call begins
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=reentrant) if twice else block(tokens)
        tokens[:, 7].square().sum().backward()
        gradients.append(model.blocks[0].mlp.fc1.weight.grad)
    assert gradients[0].abs().max() > 0
    close(gradients[1], gradients[0], 1e-5)


# The other rule ----------------------------------------------------------------------------


@pytest.mark.parametrize(("border", "least"), [(True, 1), (False, 1), (False, 3)])
def test_the_direction_rule_is_the_naive_loop(border: bool, least: int) -> None:
    backbone = tiny_vit()
    images = pictures(backbone, 4, size=(8 * 14, 7 * 14))
    tokens, layout = before(backbone, images)
    direction = layout.take(tokens, "patches")[0, 24] - layout.take(tokens, "patches").mean((0, 1))
    repaired = with_rule(
        backbone,
        DirectionRule(direction, num_deviations=1.5, ignore_border=border, min_tokens=least),
    )
    got = layout.take(before(repaired, images)[0], "patches")
    counts = []
    for new, old in zip(got, layout.take(tokens, "patches"), strict=True):
        wanted, count = smoothed(old.unflatten(0, layout.grid_size), direction, 1.5, border, least)
        close(new.unflatten(0, layout.grid_size), wanted, 1e-5)
        counts.append(count)
    assert sum(counts)
    assert torch.equal(layout.take(before(repaired, images)[0], "cls"), layout.take(tokens, "cls"))


# Copies, records, mistakes -----------------------------------------------------------------


def rules(backbone: Backbone, images: Tensor) -> list[Any]:
    tokens, layout = before(backbone, images)
    direction = layout.take(tokens, "patches")[0, 12]
    return [
        NormRule(cutoff_for(backbone, images), "gaussian"),
        DirectionRule(direction, num_deviations=1.0, ignore_border=False, min_tokens=2, temperature=0.2),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_is_a_copy(which: int) -> None:
    backbone = tiny_vit()
    images = pictures(backbone)
    repaired = with_rule(backbone, rules(backbone, images)[which])
    wanted = repaired(images).tokens
    again = copy.deepcopy(repaired)
    for addition in repaired.additions:
        assert isinstance(addition, NeighbourRepair)
        addition.rule = NormRule(1e9)
    assert torch.equal(again(images).tokens, wanted)
    assert torch.equal(repaired(images).tokens, backbone(images).tokens)


@pytest.mark.parametrize("which", [0, 1])
def test_records_and_folders_bring_it_back(which: int, tmp_path: Path) -> None:
    backbone = tiny_vit()
    images = pictures(backbone)
    repaired = with_rule(backbone, rules(backbone, images)[which])
    repaired.add(NeighbourRepair(2, NormRule(cutoff_for(backbone, images))))
    wanted = repaired(images).tokens
    assert not torch.equal(wanted, backbone(images).tokens)
    records = json.loads(json.dumps([addition.to_record() for addition in repaired.additions]))
    fresh = tiny_vit(seed=5)
    add_from_records(fresh, records)
    fresh.module.load_state_dict(repaired.module.state_dict())
    assert torch.equal(fresh(images).tokens, wanted)
    again = regista.load(repaired.save_pretrained(tmp_path / "model"))
    assert torch.equal(again(images).tokens, wanted)
    assert [addition.to_record() for addition in again.additions] == records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", [0, 1])
def test_other_precisions(which: int, dtype: torch.dtype) -> None:
    backbone = tiny_vit()
    images = pictures(backbone)
    repaired = with_rule(backbone, rules(backbone, images)[which]).to(dtype=dtype)
    with torch.no_grad():
        tokens = repaired(images).tokens
        changed = (tokens - copy.deepcopy(backbone).to(dtype=dtype)(images).tokens).abs().amax()
    assert tokens.dtype == dtype
    assert changed > 0


def test_broken_images_are_named_and_spoil_no_other() -> None:
    backbone = tiny_vit()
    images = pictures(backbone, 2)
    repaired = with_rule(backbone, NormRule(cutoff_for(backbone, images)))

    def spoil(tokens: Tensor) -> Tensor:
        spoilt = tokens.clone()
        spoilt[1] = float("nan")
        return spoilt

    seen: list[Tensor] = []
    with (
        torch.no_grad(),
        repaired.editing({"blocks.0.resid": spoil}),
        pytest.raises(ValueError, match=r"blocks.0.resid, first in image 1"),
    ):
        repaired(images, {SITE: lambda tokens: seen.append(tokens) or tokens})
    close(seen[0][0], before(repaired, images)[0][0], 1e-6)


def test_models_and_calls_that_tell_no_grid_are_refused() -> None:
    stem = other("test_torchvision", lambda tests: tests.model("convolutional stem"))()
    with pytest.raises(ValueError, match="no patch convolution"):
        stem.add(NeighbourRepair(0, NormRule(1.0)))
    with pytest.raises(ValueError, match="blocks 0 to 3, got 4"):
        tiny_vit().add(NeighbourRepair(4, NormRule(1.0)))
    backbone = with_rule(tiny_vit(), NormRule(1.0))
    with pytest.raises(ValueError, match="calls of the whole model"):
        backbone.block_sites()[BLOCK].block(torch.zeros(1, 10, 64))
    backbone(pictures(backbone))
    with pytest.raises(ValueError, match=r"got 30 tokens.*grid of \(6, 5\)"):
        backbone.block_sites()[BLOCK].block(torch.zeros(1, 30, 64))  # one token is missing


def test_wrong_settings_are_refused() -> None:
    for cutoff in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cutoff is a positive norm"):
            NormRule(cutoff)
    with pytest.raises(ValueError, match="kernel must be one of"):
        NormRule(1.0, "round")  # type: ignore[arg-type]
    backbone = tiny_vit()
    with pytest.raises(ValueError, match="unknown rule 'nrom' of neighbour-repair; known: norm, direction"):
        add_from_records(backbone, [{"kind": "neighbour-repair", "block": 0, "rule": "nrom"}])
    with pytest.raises(ValueError, match=r"makes no sense.*cutoff"):
        add_from_records(backbone, [{"kind": "neighbour-repair", "block": 0, "rule": "norm"}])
    assert backbone.additions == []
