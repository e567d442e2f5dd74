"""open_clip's image towers under the backbone contract, against its own forward at every size."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone
from tests.backbones.contract import BackboneContract
from tests.backbones.probes import close, pictures, randomise, unchanged

open_clip = pytest.importorskip("open_clip")
adapters = pytest.importorskip("regista.backbones.open_clip")
OpenClipBackbone = adapters.OpenClipBackbone

TEXT: dict[str, Any] = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
VISION: dict[str, Any] = {"layers": 2, "width": 48, "head_width": 24, "patch_size": 14, "image_size": 56}
POOLED: dict[str, Any] = {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patch 16": {"patch_size": 16, "image_size": 64},
    "wide grid": {"image_size": (56, 84)},
    "no norm before": {"no_ln_pre": True, "ls_init_value": 0.5},
    "patch dropout": {"patch_dropout": 0.5},
    "fixed positions": {"pos_embed_type": "sin_cos_2d"},
    "mean": {"pool_type": "avg"},
    "mean, then norm": {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "CLS, then norm": {"final_ln_after_pool": True},
    "attention pooling": POOLED,
    "attention pooling, mean": {**POOLED, "pool_type": "avg"},
    "own attention": {"block_type": "custom"},
    "own attention with norms": {"qk_norm": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True},
    "own attention, scaled heads": {"scale_heads": True},
}
VARIANTS = (*TOWERS, "quick gelu", "image tower only", "sequence first", "text in its own module")


def model(variant: str = "plain", **options: Any) -> Any:
    """A small random model with both towers."""
    torch.manual_seed(0)
    kind = open_clip.CustomTextCLIP if variant == "text in its own module" else open_clip.CLIP
    tower = kind(16, {**VISION, **TOWERS.get(variant, {})}, TEXT, quick_gelu=variant == "quick gelu", **options)
    if variant == "sequence first":
        for part in tower.visual.transformer.modules():
            if hasattr(part, "batch_first"):
                part.batch_first = False
    sharp = variant.startswith("own")  # wide initial weights: at twice the scale rounding passes 1e-5
    return randomise(tower, scale=0.5 if sharp else 1.0)


def upstream(backbone: Backbone, images: Tensor) -> Any:
    """A copy of the tower, brought to the image size by open_clip's own function for loading weights."""
    visual: Any = copy.deepcopy(backbone.module)
    visual.grid_size = tuple(side // backbone.patch_size for side in images.shape[-2:])
    state = {"visual.positional_embedding": visual.positional_embedding.data}
    if tuple(images.shape[-2:]) != tuple(visual.image_size):
        if len(set(backbone.module.grid_size)) > 1:  # open_clip takes stored tables for square ones
            state["visual.positional_embedding"] = by_hand(backbone, visual.grid_size)
        open_clip.model.resize_pos_embed(state, SimpleNamespace(visual=visual))
    visual.positional_embedding = nn.Parameter(state["visual.positional_embedding"])
    return visual


def by_hand(backbone: Backbone, grid: tuple[int, int]) -> Tensor:
    table: Any = backbone.module.positional_embedding.data
    rows, cols = backbone.module.grid_size
    patches = table[1:].reshape(1, rows, cols, -1).permute(0, 3, 1, 2)
    patches = nn.functional.interpolate(patches, grid, mode="bicubic", antialias=True)
    return torch.cat([table[:1], patches.flatten(2).transpose(1, 2).squeeze(0)])


def norms_after_pooling(visual: Any) -> bool:
    return visual.attn_pool is not None or (visual.final_ln_after_pool and visual.pool_type == "avg")


class TestOpenClip(BackboneContract):
    variants: ClassVar = VARIANTS
    without_place: ClassVar = ("mean", "mean, then norm", "attention pooling", "attention pooling, mean")

    def make(self, variant: str) -> Backbone:
        tower = model(variant)
        return OpenClipBackbone(tower.visual if variant == "image tower only" else tower, name=variant)

    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        visual = upstream(backbone, images)
        if norms_after_pooling(visual):
            visual.ln_post = nn.Identity()
        visual.attn_pool, visual.proj, visual.output_tokens = None, None, True
        visual.pool_type, visual.final_ln_after_pool = "tok", False
        cls, patches = visual(images)
        return {"cls": cls.unsqueeze(1), "patches": patches}

    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        visual = upstream(backbone, images)
        attention = visual.transformer.resblocks[block].attn
        seen: list[Tensor] = []
        if isinstance(attention, nn.MultiheadAttention):

            def with_weights(_module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
                return args, {**options, "need_weights": True, "average_attn_weights": False}

            attention.register_forward_pre_hook(with_weights, with_kwargs=True)
            attention.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
            visual(images)
            (probabilities,) = seen
            return probabilities
        for norm in (attention.ln_q, attention.ln_k):
            norm.register_forward_hook(lambda _module, _args, output: seen.append(output))
        visual(images)
        queries, keys = seen
        return (queries @ keys.transpose(-1, -2) * attention.scale).softmax(-1)

    def reference_global(self, backbone: Backbone, images: Tensor) -> Tensor | None:
        visual = upstream(backbone, images)
        if visual.attn_pool is not None:
            return None
        if norms_after_pooling(visual):
            visual.ln_post = nn.Identity()
        visual.proj = None
        pooled: Tensor = visual(images)
        return pooled

    def reference_pool_attention(self, backbone: Backbone, images: Tensor) -> Tensor:
        pool = upstream(backbone, images).attn_pool
        tokens = pool.ln_k(backbone(images).tokens)
        queries = pool.ln_q(pool.query).expand(len(images), -1, -1)
        _, probabilities = pool.attn(queries, tokens, tokens, average_attn_weights=False)
        return probabilities

    def has_final_norm(self, backbone: Backbone) -> bool:
        return not norms_after_pooling(backbone.module)

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        table: nn.Parameter = backbone.module.positional_embedding
        return table


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [(56, 56), (84, 70)])
def test_image_embeddings_are_the_librarys_own(variant: str, size: tuple[int, int]) -> None:
    tower = model(variant)
    if variant in ("patch 16", "wide grid"):
        size = tuple(tower.visual.image_size)
    backbone = OpenClipBackbone(tower, name=variant)
    images = pictures(backbone, size=size)
    with torch.no_grad():
        wanted = upstream(backbone, images)(images)
        close(backbone.image_embedding(backbone(images)), wanted, 1e-5)
        if tuple(size) == tuple(tower.visual.image_size):
            close(wanted, tower.encode_image(images), 1e-5)


def test_projected_cls_is_encode_image() -> None:
    tower = model()
    features = OpenClipBackbone(tower, name="clip")(pictures(OpenClipBackbone(tower, name="clip"), size=(56, 56)))
    images = pictures(OpenClipBackbone(tower, name="clip"), size=(56, 56))
    with torch.no_grad():
        close(features.cls @ tower.visual.proj, tower.encode_image(images), 1e-5)


def test_the_native_fast_path_does_not_hide_attention() -> None:
    backbone = OpenClipBackbone(model(), name="clip")
    images = pictures(backbone, size=(56, 56))

    def ran_fast(capture: tuple[str, ...]) -> bool:
        with torch.profiler.profile() as profile, torch.inference_mode():
            assert set(backbone(images, capture).captured) == set(capture)
        return any(event.key == "aten::_native_multi_head_attention" for event in profile.key_averages())

    assert ran_fast(())
    assert ran_fast(("blocks.0.resid", "blocks.0.mlp_hidden"))
    assert not ran_fast(("blocks.0.attn",))


def test_the_hidden_units_of_quick_gelu_are_its_own() -> None:
    images = torch.randn(2, 3, 56, 56)
    captured = {}
    for variant in ("plain", "quick gelu"):
        tower = model(variant)
        block, *_ = tower.visual.transformer.resblocks
        captured[variant] = OpenClipBackbone(tower, name=variant)(images, ["blocks.0.mlp_hidden"]).captured
        before: list[Tensor] = []
        handle = block.mlp.c_fc.register_forward_hook(
            lambda _module, _args, output, before=before: before.append(output)
        )
        tower.visual(images)
        handle.remove()
        (x,) = before
        wanted = x * torch.sigmoid(1.702 * x) if variant == "quick gelu" else nn.functional.gelu(x)
        close(captured[variant]["blocks.0.mlp_hidden"], wanted.detach(), 1e-5)
    plain, quick = (values["blocks.0.mlp_hidden"] for values in captured.values())
    assert (plain - quick).abs().max() > 1e-3


def test_sequence_first_blocks_are_read_batch_first() -> None:
    images = torch.randn(2, 3, 70, 84)
    sites = ("blocks.1.resid", "blocks.1.attn", "blocks.1.mlp_hidden")
    plain, turned = (OpenClipBackbone(model(variant), name=variant) for variant in ("plain", "sequence first"))
    assert turned.module.transformer.batch_first is False
    with unchanged(turned.module):
        got, wanted = turned(images, sites), plain(images, sites)
    for site in sites:
        close(got.captured[site], wanted.captured[site], 1e-5)


def test_another_convention_changes_the_features() -> None:
    from regista.backbones.positions import TRANSFORMERS

    tower, images = model(), torch.randn(1, 3, 28, 42)
    own = OpenClipBackbone(tower, name="own")(images).tokens
    other = OpenClipBackbone(tower, name="other", positions=TRANSFORMERS)(images).tokens
    assert (own - other).abs().max() > 1e-3


def test_pixel_statistics_come_from_the_tower() -> None:
    tower = model()
    assert OpenClipBackbone(tower, name="clip").mean == pytest.approx(open_clip.OPENAI_DATASET_MEAN)
    assert OpenClipBackbone(tower, name="clip").std == pytest.approx(open_clip.OPENAI_DATASET_STD)
    tower.visual.image_mean, tower.visual.image_std = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
    assert OpenClipBackbone(tower, name="clip").mean == (0.5, 0.4, 0.3)
    tower.visual.preprocess_cfg = {"mean": (0.1, 0.1, 0.1), "std": (0.2, 0.2, 0.2)}
    backbone = OpenClipBackbone(tower, name="clip", image_size=(70, 84))
    assert (backbone.mean, backbone.std) == ((0.1, 0.1, 0.1), (0.2, 0.2, 0.2))
    assert (backbone.image_size, backbone.num_register_tokens) == ((70, 84), 0)
    assert OpenClipBackbone(model("wide grid"), name="wide").image_size == (56, 84)


@pytest.mark.parametrize("variant", ["plain", "text in its own module"])
def test_the_text_tower_is_reachable(variant: str) -> None:
    tower = model(variant)
    backbone = OpenClipBackbone(tower, name="open_clip/ViT-B-32/laion2b")
    tokens = torch.randint(0, 64, (3, 8))
    with torch.no_grad():
        close(backbone.encode_text(tokens), tower.encode_text(tokens), 1e-6)
    backbone.to(dtype=torch.float64)
    assert backbone.encode_text(tokens).dtype == torch.float64
    assert backbone.full_model is tower
    assert backbone.module is tower.visual


def test_tokenizers_go_by_the_architecture() -> None:
    tower = open_clip.CLIP(16, VISION, {**TEXT, "context_length": 77, "vocab_size": 49408})
    backbone = OpenClipBackbone(tower, name="open_clip/ViT-B-32/laion2b")
    tokens = backbone.tokenizer()(["a cat", "two dogs"])
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-B-32")(["a cat", "two dogs"]))
    with torch.no_grad():
        close(backbone.encode_text(["a cat", "two dogs"]), tower.encode_text(tokens), 1e-6)
    assert backbone.tokenizer("coca_ViT-B-32")(["a cat"]).shape == (1, 76)
    backbone.name = "my model"
    with pytest.raises(ValueError, match=r"'my model' is no open_clip architecture"):
        backbone.encode_text(["a cat"])
    assert backbone.tokenizer("ViT-L-14")(["a cat"]).shape == (1, 77)
    with pytest.raises(ValueError, match="only the image tower"):
        OpenClipBackbone(tower.visual, name="open_clip/ViT-B-32/laion2b").encode_text(["a cat"])


def timm_tower(trunk: str, pool: str, head: str) -> Any:
    vision = {"timm_model_name": trunk, "timm_pool": pool, "timm_proj": head, "image_size": 160}
    return randomise(open_clip.CustomTextCLIP(16, vision, TEXT))


@pytest.mark.parametrize(
    ("trunk", "pool", "head"),
    [
        ("test_vit", "token", "linear"),
        ("test_vit", "avg", "linear"),
        ("test_vit2", "avg", ""),
        ("test_vit3", "map", "mlp"),
    ],
)
def test_timm_towers_go_to_the_timm_adapter(trunk: str, pool: str, head: str) -> None:
    from regista.backbones.timm import TimmBackbone

    tower = timm_tower(trunk, pool, head)
    tower.visual.image_mean, tower.visual.image_std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    backbone = adapters.open_clip_backbone(tower, "open_clip/ViT-B-16-SigLIP/webli", image_size=(64, 80))
    plain = TimmBackbone(tower.visual.trunk, name=trunk)
    assert isinstance(backbone, TimmBackbone)
    assert (backbone.library, backbone.image_size, backbone.std) == ("open_clip", (64, 80), (0.25, 0.25, 0.25))
    assert backbone.num_register_tokens == plain.num_register_tokens == (0 if trunk == "test_vit" else 1)
    assert backbone.sites() == plain.sites()
    images = pictures(backbone)
    got, wanted = backbone(images, backbone.sites()), plain(images, plain.sites())
    assert torch.equal(got.tokens, wanted.tokens)
    assert all(torch.equal(value, wanted.captured[site]) for site, value in got.captured.items())
    assert torch.equal(
        backbone.global_vector(got.tokens, got.layout), plain.global_vector(wanted.tokens, wanted.layout)
    )
    native = pictures(backbone, size=plain.image_size)
    tokens = torch.randint(0, 64, (3, 8))
    with torch.no_grad():
        close(backbone.image_embedding(backbone(native)), tower.encode_image(native), 1e-5)
        close(backbone.encode_text(tokens), tower.encode_text(tokens), 1e-6)
    assert backbone.to(dtype=torch.float64).encode_text(tokens).dtype == torch.float64


def test_the_kind_of_adapter_follows_the_tower() -> None:
    tower = model("text in its own module")
    for module in (tower, tower.visual):
        assert type(adapters.open_clip_backbone(module, "clip")) is OpenClipBackbone
    timm = timm_tower("test_vit", "token", "linear")
    for module in (timm, timm.visual):
        assert type(adapters.open_clip_backbone(module, "clip")) is adapters.OpenClipTimmBackbone


def test_coca_is_read_like_the_others() -> None:
    from open_clip.coca_model import CoCa

    vision, text = {**VISION, **POOLED, "output_tokens": True}, {**TEXT, "embed_cls": True, "output_tokens": True}
    coca: Any = randomise(CoCa(16, {**TEXT, "attn_pooler_heads": 2}, text, vision))
    backbone = adapters.open_clip_backbone(coca, "open_clip/coca_ViT-B-32/laion2b")
    images = pictures(backbone, size=(56, 56))
    features = backbone(images, ["pool.attn", "blocks.0.attn"])
    assert features.captured["pool.attn"].shape == (2, 2, 5, features.layout.num_tokens)
    tokens = torch.randint(0, 64, (3, 7))
    with torch.no_grad():
        close(backbone.image_embedding(features), coca.encode_image(images, normalize=False), 1e-5)
        close(backbone.encode_text(tokens), coca.encode_text(tokens, normalize=False), 1e-6)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"layers": [1, 1, 1, 1], "width": 16, "head_width": 32}, "ModifiedResNet"),
        ({**VISION, "patch_size": (14, 28)}, r"\(14, 28\) px are not square"),
        ({**VISION, **POOLED, "width": 16, "head_width": 8, "attentional_pool": "parallel"}, "'parallel'"),
        ({**VISION, "scaled_cosine_attn": True}, "scaled cosine"),
        ({"timm_model_name": "test_resnet", "timm_pool": "avg"}, "ResNet is not a timm VisionTransformer"),
    ],
)
def test_towers_that_cannot_be_read_are_refused(vision: dict[str, Any], message: str) -> None:
    tower = open_clip.CustomTextCLIP(16, vision, TEXT)
    with pytest.raises(ValueError, match=message):
        adapters.open_clip_backbone(tower, "odd")


def test_private_names_are_still_read() -> None:
    visual = model().visual
    for name in ("attn_pool", "pool_type", "final_ln_after_pool", "grid_size", "image_size", "patch_size", "proj"):
        assert hasattr(visual, name)
    assert visual.transformer.batch_first is True
    assert next(iter(model("own attention").visual.transformer.resblocks)).attn.logit_scale is None
    assert model("attention pooling").visual.attn_pool_contrastive is None
