"""What every backbone adapter must do, whatever library is behind it.

A test class of an adapter subclasses ``BackboneContract``, names its ``variants`` and fills in
``make``, ``reference_tokens`` and ``unfused_attention`` with the library's own code.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.capture import ATTENTION, HOOKED
from tests.backbones.insertion_contract import InsertionContract
from tests.backbones.probes import COLS, ROWS, close, drop_half, pictures, unchanged
from tests.tolerances import TOLERANCES


class BackboneContract(InsertionContract, ABC):
    """Tests that run for every variant of an adapter's test class.

    Attributes:
        variants: Names that ``make`` turns into backbones; each runs every test.
        tolerance: For all comparisons in float32.
    """

    variants: ClassVar[Sequence[str]] = ("default",)
    tolerance: ClassVar[float] = TOLERANCES[torch.float32][1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test once a variant."""
        if "cured" in metafunc.fixturenames:
            metafunc.parametrize("variant", [name for name in self.variants if name not in self.without_place])
        elif "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants)

    @pytest.fixture
    def backbone(self, variant: str) -> Backbone:
        torch.manual_seed(0)
        return self.make(variant)

    # What an adapter's test fills in --------------------------------------------------------

    @abstractmethod
    def make(self, variant: str) -> Backbone:
        """A backbone with random weights in evaluation mode; at least two blocks."""

    @abstractmethod
    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own features: {segment: (B, count, D)}, taken apart by the library where it can."""

    @abstractmethod
    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        """Attention probabilities (B, H, N, N) through the library's own unfused path."""

    def reference_global(self, backbone: Backbone, images: Tensor) -> Tensor | None:
        """The library's own image vector (B, D); None: CLS, or the mean patch without one."""
        return None

    def reference_pool_attention(self, backbone: Backbone, images: Tensor) -> Tensor:
        """(B, H, queries, P) of the pooling head; needed where "pool.attn" is a site."""
        raise NotImplementedError

    def has_final_norm(self, backbone: Backbone) -> bool:
        """Whether tokens pass a norm behind the last block."""
        return True

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        """The learned absolute positions, None for a model without."""
        return None

    # Layout and token order -----------------------------------------------------------------

    def test_layout_is_as_long_as_the_sequence(self, backbone: Backbone) -> None:
        for size in (backbone.image_size, (ROWS * backbone.patch_size, COLS * backbone.patch_size)):
            features = backbone(pictures(backbone, 1, size))
            assert features.layout == backbone.layout(size)
            assert features.tokens.shape == (1, features.layout.num_tokens, backbone.embed_dim)
            assert features.layout.image_size == size
            assert features.registers.shape[1] == backbone.num_register_tokens
            assert features.patch_map().shape == (1, backbone.embed_dim, *features.layout.grid_size)

    def test_tokens_are_the_librarys_own(self, backbone: Backbone) -> None:
        for size in (backbone.image_size, (ROWS * backbone.patch_size, COLS * backbone.patch_size)):
            images = pictures(backbone, 2, size)
            features = backbone(images)
            with torch.no_grad():
                reference = self.reference_tokens(backbone, images)
            assert {"patches"} <= set(reference)
            parts = features.layout.split(features.tokens)
            assert {name for name, part in parts.items() if part.shape[1]} == set(reference)
            for name, wanted in reference.items():
                close(parts[name], wanted, self.tolerance)

    def test_global_vector(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        features = backbone(images)
        wanted = self.reference_global(backbone, images)
        if wanted is None:
            wanted = features.cls if features.cls is not None else features.patches.mean(1)
        close(backbone.global_vector(features.tokens, features.layout), wanted, self.tolerance)

    def test_rows_before_columns(self, backbone: Backbone) -> None:
        size = (ROWS * backbone.patch_size, COLS * backbone.patch_size)
        dark = torch.zeros(1, 3, *size)
        top, left = dark.clone(), dark.clone()
        top.narrow(2, 0, backbone.patch_size).fill_(3.0)
        left.narrow(3, 0, backbone.patch_size).fill_(3.0)
        wanted = {"top": torch.zeros(ROWS, COLS), "left": torch.zeros(ROWS, COLS)}
        wanted["top"].narrow(0, 0, 1).fill_(1)
        wanted["left"].narrow(1, 0, 1).fill_(1)
        capture = [site for site in ("patch_embed",) if site in backbone.sites()]
        for name, image in (("top", top), ("left", left)):
            bright, base = backbone(image, capture), backbone(dark, capture)
            if capture:
                change = (bright.captured["patch_embed"] - base.captured["patch_embed"]).norm(dim=-1).squeeze(0)
                assert torch.equal((bright.layout.to_grid(change) > 1e-4).float(), wanted[name])
            change = (bright.patch_map() - base.patch_map()).norm(dim=1).squeeze(0)
            assert change[wanted[name] == 1].mean() > 1.2 * change[wanted[name] == 0].mean()

    # Captures -------------------------------------------------------------------------------

    def test_every_site_is_captured_in_its_shape(self, backbone: Backbone) -> None:
        sites = backbone.sites()
        assert {f"blocks.{b}.{kind}" for b in range(backbone.depth) for kind in (*HOOKED, *ATTENTION)} <= set(sites)
        features = backbone(pictures(backbone), sites)
        layout, heads = features.layout, backbone.num_heads
        tokens, prefix = layout.num_tokens, layout.num_prefix_tokens
        assert set(features.captured) == set(sites)
        for block, modules in enumerate(backbone.block_sites()):
            shapes = {kind: tuple(features.captured[f"blocks.{block}.{kind}"].shape) for kind in (*HOOKED, *ATTENTION)}
            assert shapes["resid"] == (2, tokens, backbone.embed_dim)
            assert shapes["mlp_hidden"] == (2, tokens, modules.mlp_out.weight.shape[1])
            head_width = shapes["v"][-1]
            assert all(shapes[kind] == (2, heads, tokens, head_width) for kind in "qkv")
            assert shapes["attn"] == (2, heads, tokens, tokens)
            assert shapes["attn_received"] == (2, heads, tokens)
            assert shapes["attn_prefix"] == (2, heads, prefix, tokens)
        if "patch_embed" in sites:
            assert features.captured["patch_embed"].shape[:2] == (2, layout.num_patches)

    def test_attention_equals_the_unfused_computation(self, backbone: Backbone) -> None:
        for size in (backbone.image_size, (ROWS * backbone.patch_size, COLS * backbone.patch_size)):
            images = pictures(backbone, 2, size)
            captured = backbone(images, [f"blocks.{b}.attn" for b in range(backbone.depth)]).captured
            for block in range(backbone.depth):
                with torch.no_grad():
                    wanted = self.unfused_attention(backbone, images, block)
                close(captured[f"blocks.{block}.attn"], wanted, self.tolerance)

    def test_attention_sites_agree(self, backbone: Backbone) -> None:
        features = backbone(pictures(backbone), backbone.sites())
        layout = features.layout
        for block in range(backbone.depth):
            got = {kind: features.captured[f"blocks.{block}.{kind}"] for kind in ATTENTION}
            attn = got["attn"]
            close(attn.sum(-1), torch.ones(attn.shape[:-1]), self.tolerance)
            assert attn.std() > 1e-4, "the test model's attention is flat, so nothing is tested"
            logits = torch.einsum("bhqd,bhkd->bhqk", got["q"], got["k"]) * got["q"].shape[-1] ** -0.5
            close(attn, logits.softmax(-1), self.tolerance)
            close(got["attn_received"], attn.mean(-2), self.tolerance)
            rows = [layout.take(attn, name, -2) for name, _ in layout.segments if name != "patches"]
            close(got["attn_prefix"], torch.cat(rows, -2) if rows else attn.narrow(-2, 0, 0), self.tolerance)

    def test_each_site_alone_is_what_it_is_among_all(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        together = backbone(images, backbone.sites())
        for site in backbone.sites():
            alone = backbone(images, [site])
            assert set(alone.captured) == {site}
            close(alone.captured[site], together.captured[site], self.tolerance)
            close(alone.tokens, together.tokens, self.tolerance)

    def test_captures_leave_the_output_alone(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        close(backbone(images, backbone.sites()).tokens, backbone(images).tokens, self.tolerance)

    def test_resid_of_the_last_block_is_before_the_final_norm(self, backbone: Backbone) -> None:
        last = f"blocks.{backbone.depth - 1}.resid"
        features = backbone(pictures(backbone), [last])
        same = torch.allclose(features.captured[last], features.tokens, atol=1e-3)
        assert same is not self.has_final_norm(backbone)

    def test_reducers_run_inside_the_forward(self, backbone: Backbone) -> None:
        site = f"blocks.{backbone.depth - 1}.resid"
        images = pictures(backbone)
        norms = backbone(images, {site: lambda x: x.float().norm(dim=-1)}).captured[site]
        close(norms, backbone(images, [site]).captured[site].norm(dim=-1), self.tolerance)

    def test_a_batch_of_three_equals_three_of_one(self, backbone: Backbone) -> None:
        images = pictures(backbone, 3)
        batch = backbone(images, backbone.sites())
        for index, image in enumerate(images.split(1)):
            single = backbone(image, backbone.sites())
            close(batch.tokens.narrow(0, index, 1), single.tokens, self.tolerance)
            for site, value in single.captured.items():
                close(batch.captured[site].narrow(0, index, 1), value, self.tolerance)

    def test_pool_attention(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        if backbone.pool_attention() is None:
            with pytest.raises(ValueError, match=r"pool\.attn"):
                backbone(images, ["pool.attn"])
            return
        got = backbone(images, ["pool.attn"]).captured["pool.attn"]
        close(got.sum(-1), torch.ones(got.shape[:-1]), self.tolerance)
        with torch.no_grad():
            close(got, self.reference_pool_attention(backbone, images), self.tolerance)

    # Edits ----------------------------------------------------------------------------------

    def test_edits_change_the_output_and_are_undone(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        plain = backbone(images)
        patches = plain.layout.slice("patches")

        def without_a_token(x: Tensor) -> Tensor:
            return x.index_fill(1, torch.tensor([patches.stop - 1]), 0.0)

        def without_a_unit(x: Tensor) -> Tensor:
            strongest = x.abs().mean((0, 1)).argmax()
            return x.index_fill(2, strongest, 0.0)

        edits = {"resid": without_a_token, "mlp_hidden": without_a_unit, "v": torch.zeros_like, "q": torch.zeros_like}
        for kind, edit in edits.items():
            site = f"blocks.0.{kind}"
            with unchanged(backbone.module):
                with backbone.editing({site: edit}):
                    edited = backbone(images, [site])
                assert (edited.tokens - plain.tokens).abs().max() > 10 * self.tolerance, kind
                close(edited.captured[site], edit(backbone(images, [site]).captured[site]), self.tolerance)
            close(backbone(images).tokens, plain.tokens, self.tolerance)

    def test_edited_attention_is_used(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        plain = backbone(images)
        with backbone.editing({"blocks.0.attn": torch.clone}):
            close(backbone(images).tokens, plain.tokens, self.tolerance)
        with backbone.editing({"blocks.0.attn": lambda attn: torch.full_like(attn, 1 / attn.shape[-1])}):
            edited = backbone(images, ["blocks.0.attn"])
        with backbone.editing({"blocks.0.q": torch.zeros_like}):
            close(edited.tokens, backbone(images).tokens, self.tolerance)
        assert edited.captured["blocks.0.attn"].std() < 1e-6

    def test_wrong_sites_and_shapes_are_refused(self, backbone: Backbone) -> None:
        images = pictures(backbone, 1)
        with pytest.raises(ValueError, match=f"blocks.{backbone.depth}.resid"):
            backbone(images, [f"blocks.{backbone.depth}.resid"])
        with pytest.raises(ValueError, match="attn_received"):
            backbone.editing({"blocks.0.attn_received": torch.clone}).__enter__()
        with (
            unchanged(backbone.module),
            pytest.raises(ValueError, match="shape"),
            backbone.editing({"blocks.0.resid": lambda x: x.narrow(1, 0, 1)}),
        ):
            backbone(images)

    # Nothing stays behind -------------------------------------------------------------------

    def test_a_call_leaves_the_module_as_it_was(self, backbone: Backbone) -> None:
        for size in (backbone.image_size, (ROWS * backbone.patch_size, COLS * backbone.patch_size)):
            with unchanged(backbone.module):
                backbone(pictures(backbone, 1, size), backbone.sites())

    def test_an_exception_leaves_the_module_as_it_was(self, backbone: Backbone) -> None:
        def fail(_x: Tensor) -> Tensor:
            raise KeyError("planted")

        images = pictures(backbone, 1)
        before = backbone(images).tokens
        for site in ("blocks.0.resid", "blocks.1.mlp_hidden", "blocks.1.attn", "blocks.0.q"):
            with unchanged(backbone.module), pytest.raises(KeyError, match="planted"), backbone.editing({site: fail}):
                backbone(images)
            with unchanged(backbone.module), pytest.raises(KeyError, match="planted"):
                backbone(images, {site: fail})
        assert torch.equal(backbone(images).tokens, before)

    def test_training_mode_is_kept_but_calls_run_as_evaluation(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        wanted = backbone(images).tokens
        drop_half(backbone.module)
        backbone.module.train()
        next(backbone.module.children()).eval()
        with unchanged(backbone.module):
            close(backbone(images, backbone.sites()).tokens, wanted, self.tolerance)
        assert backbone.module.training

    # Bad input ------------------------------------------------------------------------------

    def test_a_size_that_is_not_divisible_is_refused(self, backbone: Backbone) -> None:
        height, width = ROWS * backbone.patch_size + 1, COLS * backbone.patch_size
        with pytest.raises(ValueError, match=rf"{height}x{width}.*{backbone.patch_size}"):
            backbone(pictures(backbone, 1, (height, width)))

    def test_a_nan_pixel_names_its_image(self, backbone: Backbone) -> None:
        images = pictures(backbone, 3)
        images.select(0, 1).select(0, 0).select(0, 3).fill_(float("nan"))
        with pytest.raises(ValueError, match="image 1"):
            backbone(images)

    def test_a_nan_weight_names_its_tensor(self, backbone: Backbone) -> None:
        *_, last = backbone.block_sites()
        (name,) = (key for key, value in backbone.module.named_parameters() if value is last.mlp_out.weight)
        with torch.no_grad():
            last.mlp_out.weight.flatten().narrow(0, 0, 1).fill_(float("nan"))
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            backbone(pictures(backbone))

    def test_an_infinite_activation_names_block_and_image(self, backbone: Backbone) -> None:
        def blow_up(x: Tensor) -> Tensor:
            return torch.cat([x.narrow(0, 0, 1), x.narrow(0, 1, 1) + float("inf")])

        with backbone.editing({"blocks.1.resid": blow_up}), pytest.raises(ValueError, match=r"blocks\.1\b.*image 1"):
            backbone(pictures(backbone))

    # Gradients, dtypes, modes ---------------------------------------------------------------

    def test_gradients_reach_the_weights_at_another_size(self, backbone: Backbone) -> None:
        backbone.module.requires_grad_(True)
        table = self.position_table(backbone)
        projection = backbone.patch_projection()
        weights = [table] if table is not None else []
        weights += list(projection.parameters()) if projection is not None else []
        for capture in ((), backbone.sites()):
            backbone.module.zero_grad()
            backbone(pictures(backbone), capture).tokens.square().mean().backward()
            assert weights
            assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights)

    def test_half_and_double_precision(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        wanted = backbone(images, ["blocks.1.resid", "blocks.1.attn"])
        double = backbone.to(dtype=torch.float64)(images, list(wanted.captured))
        assert double.tokens.dtype == torch.float64
        close(double.tokens, wanted.tokens, 1e-4)
        close(double.captured["blocks.1.attn"], wanted.captured["blocks.1.attn"], 1e-4)
        half = backbone.to(dtype=torch.bfloat16)(images, backbone.sites())
        assert half.tokens.dtype == torch.bfloat16
        assert half.captured["blocks.1.attn"].dtype == torch.float32
        assert (half.tokens.float() - wanted.tokens).norm() < 0.1 * wanted.tokens.norm()
        norms = half.captured["blocks.1.resid"].float().norm(dim=-1)
        torch.testing.assert_close(norms, wanted.captured["blocks.1.resid"].norm(dim=-1), rtol=0.05, atol=0.05)

    def test_without_gradients_and_in_inference_mode(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        with torch.inference_mode():
            inferred = backbone(images, backbone.sites()).tokens
        with torch.no_grad():
            plain = backbone(images, backbone.sites()).tokens
        assert not plain.requires_grad
        close(inferred, plain, self.tolerance)
        backbone.module.requires_grad_(True)
        backbone(images).tokens.sum().backward()

    def test_a_deep_copy_is_independent(self, backbone: Backbone) -> None:
        images = pictures(backbone)
        wanted = backbone(images).tokens
        twin = copy.deepcopy(backbone)
        assert torch.equal(twin(images).tokens, wanted)
        with torch.no_grad():
            for parameter in twin.module.parameters():
                parameter.mul_(1.5)
        assert torch.equal(backbone(images).tokens, wanted)
        assert not torch.allclose(twin(images, twin.sites()).tokens, wanted, atol=1e-3)
