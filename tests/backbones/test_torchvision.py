"""torchvision's ViT under the backbone contract, against its own forward at every square size."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer, interpolate_embeddings

from regista.backbones.base import Backbone
from regista.backbones.positions import TIMM
from regista.backbones.torchvision import TorchvisionBackbone
from tests.backbones.contract import BackboneContract
from tests.backbones.probes import close, pictures, randomise

SMALL: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_dim": 48, "mlp_dim": 96}
STEM = [ConvStemConfig(out_channels=8, kernel_size=3, stride=2) for _ in range(3)]
MODELS: dict[str, dict[str, Any]] = {
    "patch 14": {"image_size": 56, "patch_size": 14},
    "patch 16": {"image_size": 64, "patch_size": 16, "num_classes": 3, "representation_size": 8},
    "odd heads": {"image_size": 56, "patch_size": 14, "num_heads": 3},
    "convolutional stem": {"image_size": 32, "patch_size": 8, "conv_stem_configs": STEM},
}


def model(variant: str = "patch 14", **options: Any) -> Any:
    module: Any = randomise(VisionTransformer(**{**SMALL, **MODELS[variant], **options}))
    if variant == "convolutional stem":  # cells that see mostly their own patch
        with torch.no_grad():
            for part in module.conv_proj.modules():
                if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3):
                    part.weight[:, :, 1, 1] += torch.rand(part.weight.shape[:2])
    return module


def upstream(backbone: Backbone, images: Tensor) -> Any:
    """A copy of the model whose own forward takes these images."""
    module: Any = copy.deepcopy(backbone.module)
    rows, cols = (side // backbone.patch_size for side in images.shape[-2:])
    if rows == cols:  # by torchvision's own function for loading weights
        state = OrderedDict(module.state_dict())
        interpolate_embeddings(rows * backbone.patch_size, backbone.patch_size, state)
        table = state["encoder.pos_embedding"]
    else:
        table = by_hand(module.encoder.pos_embedding.data, rows, cols)
    module.encoder.pos_embedding = nn.Parameter(table)
    size, *_ = images.shape[-2:]
    module.image_size = size
    if rows != cols:  # its check wants a square; what comes behind it does not
        module._process_input = lambda x: module.conv_proj(x).flatten(2).permute(0, 2, 1)
    return module


def by_hand(table: Tensor, rows: int, cols: int) -> Tensor:
    """Bicubic with aligned corners, one axis after the other."""
    side = int((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    for size in ((rows, side), (rows, cols)):
        grid = nn.functional.interpolate(grid, size, mode="bicubic", align_corners=True)
    return torch.cat([table[:, :1], grid.flatten(2).transpose(1, 2)], 1)


class TestTorchvision(BackboneContract):
    variants: ClassVar = tuple(MODELS)

    def make(self, variant: str) -> Backbone:
        return TorchvisionBackbone(model(variant), name=variant)

    def reference_tokens(self, backbone: Backbone, images: Tensor) -> Mapping[str, Tensor]:
        module = upstream(backbone, images)
        seen: list[Tensor] = []
        module.encoder.ln.register_forward_hook(lambda _module, _args, output: seen.append(output))
        module.heads = nn.Identity()
        cls = module(images)
        (tokens,) = seen
        return {"cls": cls.unsqueeze(1), "patches": tokens[:, 1:]}

    def unfused_attention(self, backbone: Backbone, images: Tensor, block: int) -> Tensor:
        module = upstream(backbone, images)
        attention = module.encoder.layers[block].self_attention

        def with_weights(_module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
            return args, {**options, "need_weights": True, "average_attn_weights": False}

        seen: list[Tensor] = []
        attention.register_forward_pre_hook(with_weights, with_kwargs=True)
        attention.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
        module(images)
        (probabilities,) = seen
        return probabilities

    def position_table(self, backbone: Backbone) -> nn.Parameter | None:
        table: nn.Parameter = backbone.module.encoder.pos_embedding
        return table


@pytest.mark.parametrize("size", [28, 56, 98])
def test_the_heads_logits_follow_from_the_tokens(size: int) -> None:
    module = model(num_classes=7)
    nn.init.normal_(module.heads.head.weight)
    backbone = TorchvisionBackbone(module, name="classifier")
    images = pictures(backbone, size=(size, size))
    features = backbone(images)
    with torch.no_grad():
        close(
            module.heads(backbone.global_vector(features.tokens, features.layout)),
            upstream(backbone, images)(images),
            1e-5,
        )


def test_the_named_models_are_taken() -> None:
    with torch.device("meta"):
        module = torchvision.models.vit_b_32(weights=None)
    backbone = TorchvisionBackbone(module, name="vit_b_32")
    assert (backbone.embed_dim, backbone.depth, backbone.num_heads) == (768, 12, 12)
    assert (backbone.patch_size, backbone.image_size, backbone.num_register_tokens) == (32, (224, 224), 0)
    assert backbone.layout().num_tokens == module.seq_length == 50
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert all(sites.mlp_out is sites.block.mlp[3] for sites in backbone.block_sites())


def test_a_convolutional_stem_has_no_patch_projection() -> None:
    backbone = TorchvisionBackbone(model("convolutional stem"), name="stem")
    assert backbone.patch_projection() is None
    assert "patch_embed" not in backbone.sites()
    images = pictures(backbone, 1, (40, 24))
    assert backbone(images).layout.grid_size == (5, 3)
    module = model("convolutional stem", patch_size=16)
    with pytest.raises(ValueError, match=r"stem gives \(4, 4\) cells, wanted \(2, 2\)"):
        TorchvisionBackbone(module, name="wrong stride")(torch.randn(1, 3, 32, 32))


def test_the_native_fast_path_does_not_hide_attention() -> None:
    backbone = TorchvisionBackbone(model(), name="vit")
    images = pictures(backbone, size=(56, 56))

    def ran_fast(capture: tuple[str, ...]) -> bool:
        with torch.profiler.profile() as profile, torch.inference_mode():
            assert set(backbone(images, capture).captured) == set(capture)
        return any(event.key == "aten::_native_multi_head_attention" for event in profile.key_averages())

    assert ran_fast(())
    assert ran_fast(("blocks.0.resid", "blocks.0.mlp_hidden"))
    assert not ran_fast(("blocks.0.attn",))


def test_another_convention_changes_the_features() -> None:
    module, images = model(), torch.randn(1, 3, 84, 70)
    own = TorchvisionBackbone(module, name="own")(images).tokens
    other = TorchvisionBackbone(module, name="other", positions=TIMM)(images).tokens
    assert (own - other).abs().max() > 1e-3


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="ResNet is not a torchvision VisionTransformer"):
        TorchvisionBackbone(torchvision.models.resnet18(), name="resnet")
