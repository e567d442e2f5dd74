"""A random ViT that runs anywhere in milliseconds: for trying things out and for tests."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from regista.backbones.timm import TimmBackbone

PATCH_SIZE = 14
GRID = 8


def tiny_vit(
    *,
    num_register_tokens: int = 0,
    class_token: bool = True,
    patch_size: int = PATCH_SIZE,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 4,
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
) -> TimmBackbone:
    """A timm ``VisionTransformer`` with seeded random weights; the same bits every time.

    Args:
        num_register_tokens: R, without position slots as in DINOv2 with registers.
        class_token: With CLS, or average pooling without.
        image_size: (height, width) for ``preprocess``; 8 x 8 patches by default.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: Any = VisionTransformer(
            img_size=GRID * patch_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            class_token=class_token,
            global_pool="token" if class_token else "avg",
            reg_tokens=num_register_tokens,
            no_embed_class=num_register_tokens > 0,
            init_values=None,
            fc_norm=False,
            num_classes=0,
        ).eval()
        with torch.no_grad():
            for parameter in (module.cls_token, module.reg_token):
                if parameter is not None:
                    parameter.normal_(std=0.2)
            for block in module.blocks:
                block.attn.qkv.weight.mul_(3)
                block.mlp.fc1.weight.mul_(3)
                block.mlp.fc2.weight.mul_(3)
    return TimmBackbone(module, name="tiny", image_size=image_size)
