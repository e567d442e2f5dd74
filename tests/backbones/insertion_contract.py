"""What every adapter must do with registers, register neurons and constant keys that are put into its model."""

from __future__ import annotations

import copy
import io
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.attention_bias import AttentionBias
from regista.backbones.base import Backbone
from regista.backbones.live import from_module
from regista.backbones.register_neurons import RegisterNeurons, prefix_segments
from tests.backbones.naive_additions import constant_key, moved
from tests.backbones.probes import close, pictures, unchanged
from tests.tolerances import TOLERANCES

ORDER = ("cls", "extra", "registers", "patches")


class InsertionContract:
    """Tests that run for every variant of an adapter's test class; see ``BackboneContract``."""

    tolerance: ClassVar[float] = TOLERANCES[torch.float32][1]
    without_place: ClassVar[Sequence[str]] = ()  # variants that no register can be inserted into

    @abstractmethod
    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        """See ``BackboneContract``."""

    @abstractmethod
    def reference_global(self, backbone: Backbone, images: Tensor) -> Tensor | None:
        """See ``BackboneContract``."""

    def can_be_pickled(self, backbone: Backbone) -> bool:
        """Whether ``torch.save`` takes the whole module."""
        return True

    def whole_sequence(self, backbone: Backbone, images: Tensor) -> Tensor:
        """The library's own tokens (B, N, D), in the order in which the model has them."""
        with torch.no_grad():
            parts = self.reference_tokens(backbone, images)
        return torch.cat([parts[name] for name in ORDER if name in parts], 1)

    @pytest.fixture
    def cured(self, backbone: Backbone) -> Backbone:
        """A copy with two registers."""
        with unchanged(backbone.module):
            return backbone.with_registers(new_registers(backbone, 2))

    # Registers ------------------------------------------------------------------------------

    def test_no_registers_change_no_bit(self, backbone: Backbone) -> None:
        with unchanged(backbone.module):
            same = backbone.with_registers(torch.zeros(0, backbone.embed_dim))
        assert same.module is not backbone.module
        for size in sizes(backbone):
            images = pictures(backbone, 2, size)
            got, wanted = same(images), backbone(images)
            assert got.layout == wanted.layout
            assert torch.equal(got.tokens, wanted.tokens)
        with pytest.raises(ValueError, match=rf"\(R, {backbone.embed_dim}\)"):
            backbone.with_registers(torch.zeros(2, backbone.embed_dim + 1))

    def test_hidden_registers_leave_the_original(self, backbone: Backbone, cured: Backbone) -> None:
        before, after = backbone.num_register_tokens, cured.num_register_tokens
        assert after == before + 2
        for size in sizes(backbone):
            images = pictures(backbone, 2, size)
            plain, seen = backbone(images), cured(images)
            assert seen.layout.num_tokens == plain.layout.num_tokens + 2
            with unchanged(cured.module), cured.hiding_registers(keep=before):
                hidden = cured(images, cured.sites())
            assert same_but_registers(hidden.tokens, hidden.layout, plain.tokens, plain.layout, self.tolerance)
            if before:
                kept = hidden.registers.narrow(1, 0, before)
                close(kept, plain.registers, self.tolerance)
                with cured.hiding_registers():
                    others = cured(images)
                assert not same_but_registers(others.tokens, others.layout, plain.tokens, plain.layout, self.tolerance)
            assert (seen.patches - plain.patches).abs().max() > 10 * self.tolerance, "the registers do nothing"
            assert torch.equal(cured(images).tokens, seen.tokens)
            attn = hidden.captured["blocks.1.attn"]
            to_hidden = hidden.layout.take(attn, "registers", -1).narrow(-1, before, 2)
            assert torch.equal(to_hidden, torch.zeros_like(to_hidden))
            close(attn.sum(-1), torch.ones(attn.shape[:-1]), self.tolerance)
            got = cured.global_vector(hidden.tokens, hidden.layout)
            close(got, backbone.global_vector(plain.tokens, plain.layout), self.tolerance)

    def test_inserted_registers_are_the_modules_own(self, cured: Backbone) -> None:
        images = pictures(cured, 2, cured.image_size)
        features = cured(images)
        close(self.whole_sequence(cured, images), features.tokens, self.tolerance)
        with torch.no_grad():
            pooled = self.reference_global(cured, images)
        if pooled is not None:
            close(cured.global_vector(features.tokens, features.layout), pooled, self.tolerance)

    def test_order_and_steps_of_insertion_do_not_matter(self, backbone: Backbone, cured: Backbone) -> None:
        before, images = backbone.num_register_tokens, pictures(backbone)
        wanted = cured(images)
        new = new_registers(backbone, 2)
        first, second = new.split(1)
        stepwise = backbone.with_registers(first).with_registers(second)
        assert torch.equal(stepwise(images).tokens, wanted.tokens)
        turned = backbone.with_registers(torch.cat([second, first]))(images)
        assert same_but_registers(turned.tokens, turned.layout, wanted.tokens, wanted.layout, self.tolerance)
        close(turned.registers.narrow(1, before, 2), wanted.registers.narrow(1, before, 2).flip(1), self.tolerance)

    def test_registers_travel_with_the_module(self, backbone: Backbone, cured: Backbone) -> None:
        images = pictures(cured, 2, cured.image_size)
        wanted = cured(images).tokens
        whole = getattr(cured, "full_model", cured.module)
        modules = [whole, copy.deepcopy(whole)]
        if self.can_be_pickled(cured):
            stored = io.BytesIO()
            torch.save(whole, stored)
            stored.seek(0)
            modules.append(torch.load(stored, weights_only=False))
        for module in modules:
            live = from_module(module)
            assert live.num_register_tokens == cured.num_register_tokens
            assert torch.equal(live(images).tokens, wanted)
            assert live.with_registers(new_registers(backbone, 1)).num_register_tokens == live.num_register_tokens + 1
        other = backbone.with_registers(torch.zeros(2, backbone.embed_dim))
        other.module.load_state_dict(cured.module.state_dict())
        assert torch.equal(other(images).tokens, wanted)

    def test_a_copy_of_the_cured_is_independent(self, backbone: Backbone, cured: Backbone) -> None:
        images = pictures(backbone)
        wanted, plain = cured(images).tokens, backbone(images).tokens
        twin = copy.deepcopy(cured)
        assert torch.equal(twin(images).tokens, wanted)
        table = twin.register_table()
        assert table is not None
        assert table.shape == (1, cured.num_register_tokens, cured.embed_dim)
        with torch.no_grad():
            table.copy_(table.flip(-1))
        assert not torch.allclose(twin(images).tokens, wanted, atol=1e-3)
        with torch.no_grad():
            for parameter in twin.module.parameters():
                parameter.zero_()
        assert torch.equal(cured(images).tokens, wanted)
        assert torch.equal(backbone(images).tokens, plain)

    def test_captures_of_the_cured(self, cured: Backbone) -> None:
        images = pictures(cured, 3)
        batch = cured(images, cured.sites())
        tokens = batch.layout.num_tokens
        for block in range(cured.depth):
            attn = batch.captured[f"blocks.{block}.attn"]
            assert attn.shape == (3, cured.num_heads, tokens, tokens)
            close(attn.sum(-1), torch.ones(attn.shape[:-1]), self.tolerance)
            assert batch.captured[f"blocks.{block}.resid"].shape == (3, tokens, cured.embed_dim)
            assert batch.captured[f"blocks.{block}.mlp_hidden"].shape[:2] == (3, tokens)
        for index, image in enumerate(images.split(1)):
            close(cured(image).tokens, batch.tokens.narrow(0, index, 1), self.tolerance)

    def test_gradients_reach_every_inserted_register(self, cured: Backbone) -> None:
        table = cured.register_table()
        assert table is not None
        features = cured(pictures(cured))
        features.patches.square().mean().backward()
        assert table.grad is not None
        assert (table.grad.abs().sum(-1) > 0).all()

    def test_the_cured_in_other_precisions(self, cured: Backbone) -> None:
        images = pictures(cured)
        add_neurons(cured, num_test_time=1)
        wanted = cured(images).tokens
        double = cured.to(dtype=torch.float64)(images).tokens
        assert double.dtype == torch.float64
        close(double, wanted, 1e-4)
        half = cured.to(dtype=torch.bfloat16)(images).tokens
        assert half.dtype == torch.bfloat16
        assert (half.float() - wanted).norm() < 0.1 * wanted.norm()

    # Register neurons -----------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["paper", "released"])
    def test_register_neurons_are_the_naive_loop(self, variant: str, backbone: Backbone, way: Any) -> None:
        count = 0 if variant in self.without_place else 2
        plain = backbone.with_registers(new_registers(backbone, count)) if count else copy.deepcopy(backbone)
        cured = copy.deepcopy(plain)
        neurons = add_neurons(cured, num_test_time=min(count, 1), variant=way)
        images = pictures(backbone, 3)
        layout = plain.layout((images.shape[-2], images.shape[-1]))
        edits = {
            f"blocks.{block}.mlp_hidden": naive_edit(layout, units, min(count, 1), way)
            for block, units in neurons.items()
        }
        with torch.no_grad():
            got = cured(images, [*edits, "blocks.1.resid"])
            with plain.editing(edits):
                wanted = plain(images, [*edits, "blocks.1.resid"])
            untouched = plain(images)
        close(got.tokens, wanted.tokens, self.tolerance)
        for site, value in wanted.captured.items():
            close(got.captured[site], value, self.tolerance)
        assert (got.tokens - untouched.tokens).abs().max() > 10 * self.tolerance, "the neurons do nothing"
        close(cured(images).tokens, got.tokens, self.tolerance)  # with gradients
        native = pictures(backbone, 1, backbone.image_size)
        close(self.whole_sequence(cured, native), cured(native).tokens, self.tolerance)

    # A constant key -------------------------------------------------------------------------

    def test_a_constant_key_is_one_more_key(self, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
        images = pictures(backbone, 3)
        sites = [f"blocks.{block}.{kind}" for block in range(backbone.depth) for kind in ("q", "k", "v")]
        original = backbone(images, sites)
        width = original.captured["blocks.0.k"].shape[-1]
        keys, values = 2 * torch.randn(2, backbone.depth, backbone.num_heads, width)
        biased = copy.deepcopy(backbone)
        biased.add(AttentionBias(keys, values))
        with unchanged(backbone.module), unchanged(biased.module):
            got = biased(images, biased.sites())
        tokens = original.layout.num_tokens
        for block in range(backbone.depth):
            q, k, attn = (got.captured[f"blocks.{block}.{kind}"] for kind in ("q", "k", "attn"))
            assert k.shape == (3, backbone.num_heads, tokens, width)
            wanted, _ = constant_key(q, k, k, keys.unbind(0)[block], values.unbind(0)[block])
            close(attn, wanted, self.tolerance)
            close(got.captured[f"blocks.{block}.attn_received"], attn.mean(-2), self.tolerance)
        with torch.no_grad():
            alone = biased(images).tokens
        close(alone, got.tokens, self.tolerance)
        with monkeypatch.context() as patch, backbone.fused_attention():
            patch.setattr(F, "scaled_dot_product_attention", with_constant_keys(keys, values))
            close(backbone(images).tokens, got.tokens, self.tolerance)
        assert (got.tokens - original.tokens).abs().max() > 10 * self.tolerance
        close(biased(images.narrow(0, 2, 1)).tokens, got.tokens.narrow(0, 2, 1), self.tolerance)
        close(from_module(biased.module)(images).tokens, got.tokens, self.tolerance)


def sizes(backbone: Backbone) -> tuple[tuple[int, int] | None, ...]:
    """The native one, and one that is neither native nor square."""
    return backbone.image_size, None


def new_registers(backbone: Backbone, count: int) -> Tensor:
    """Seeded registers, the same for every number of them."""
    return 2 * torch.randn(count, backbone.embed_dim, generator=torch.Generator().manual_seed(5))


def same_but_registers(got: Tensor, got_layout: Any, wanted: Tensor, layout: Any, tolerance: float) -> bool:
    """Whether all tokens but the registers are equal."""
    return all(
        torch.allclose(got_layout.take(got, name), layout.take(wanted, name), rtol=tolerance, atol=tolerance)
        for name, _ in layout.segments
        if name != "registers"
    )


def add_neurons(backbone: Backbone, *, num_test_time: int, variant: Any = "paper") -> dict[int, tuple[int, ...]]:
    """Three units of block 0 and two of the last, put into ``backbone`` itself."""
    neurons = {0: (1, 5, 2), backbone.depth - 1: (0, 7)}
    backbone.add(RegisterNeurons(neurons, prefix_segments(backbone.layout()), num_test_time, variant))
    return neurons


def naive_edit(layout: Any, units: Any, num_test_time: int, variant: str) -> Callable[[Tensor], Tensor]:
    """See ``moved``."""

    def edit(hidden: Tensor) -> Tensor:
        return moved(hidden, layout, units, num_test_time, variant)

    return edit


def with_constant_keys(keys: Tensor, values: Tensor) -> Callable[..., Tensor]:
    """In place of torch's function: the n-th call has the n-th key and value; later calls (a pooling head) none."""
    calls: list[int] = []
    fused = nn.functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        block = len(calls)
        calls.append(block)
        if block >= len(keys):
            return fused(q, k, v, *rest, **options)
        heads = keys.shape[1]
        split = [x if x.ndim == 4 else x.unflatten(0, (-1, heads)) for x in (q, k, v)]
        _, out = constant_key(*split, keys.unbind(0)[block], values.unbind(0)[block], options.get("scale"))
        return out if q.ndim == 4 else out.flatten(0, 1)

    return attend
