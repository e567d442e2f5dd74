"""open_clip's image towers: its own VisionTransformer, and timm ViTs inside its TimmModel (SigLIP ...)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import open_clip
import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from regista.backbones.base import Backbone, evaluation_mode
from regista.backbones.capture import BlockSites
from regista.backbones.features import Features
from regista.backbones.inserted_registers import insert_by_hook
from regista.backbones.positions import (
    OPEN_CLIP,
    PositionResize,
    resize_positions,
    swapped_attributes,
    swapped_parameter,
)
from regista.backbones.timm import TimmBackbone
from regista.tokens import TokenLayout


def open_clip_backbone(module: nn.Module, name: str, *, image_size: tuple[int, int] | None = None) -> Backbone:
    """The adapter for a live open_clip model, by the kind of its image tower.

    Args:
        module: A whole model (``CLIP``, ``CustomTextCLIP``, ``CoCa``) or only its ``visual``.
        name: "open_clip/ARCH/TAG", or anything; the architecture in it names the tokenizer.
        image_size: (height, width) for ``preprocess``; the model's native size by default.

    Raises:
        ValueError: for a tower that is no ViT (a ResNet, a ConvNeXt), or one that cannot be read.
    """
    if isinstance(_tower(module), TimmModel):
        return OpenClipTimmBackbone(module, name=name, image_size=image_size)
    return OpenClipBackbone(module, name=name, image_size=image_size)


class ImageTextBackbone(Backbone):
    """An image tower whose text tower stays reachable, for zero-shot use.

    Attributes:
        full_model: What was given: the whole model, or the image tower alone.
    """

    library = "open_clip"
    full_model: Any

    @abstractmethod
    def image_embedding(self, features: Features) -> Tensor:
        """The model's own image embedding out of its tokens, not normalised: (B, E)."""

    def encode_text(self, texts: Sequence[str] | Tensor) -> Tensor:
        """Text embeddings, not normalised: (T, E).

        Args:
            texts: Strings, or token numbers (T, context length) from ``tokenizer()``.

        Raises:
            ValueError: if there is no text tower, or no tokenizer is known for the strings.
        """
        if not hasattr(self.full_model, "encode_text"):
            raise ValueError(f"{self.name}: only the image tower was given; pass the whole model to encode text")
        tokens = texts if isinstance(texts, Tensor) else self.tokenizer()(list(texts))
        with evaluation_mode(self.full_model):
            embedded: Tensor = self.full_model.encode_text(tokens.to(self.device), normalize=False)
        return embedded

    def tokenizer(self, architecture: str | None = None) -> Any:
        """open_clip's tokenizer: a callable from strings to (T, context length) token numbers.

        Args:
            architecture: An open_clip architecture; by default the one in ``name``.

        Raises:
            ValueError: for a name that open_clip does not know; it would silently take another tokenizer.
        """
        wanted = architecture or self.name.removeprefix("open_clip/")
        hub = wanted.startswith(("hf-hub:", "local-dir:"))
        wanted = wanted if hub else wanted.partition("/")[0]
        if not hub and wanted not in open_clip.list_models():
            raise ValueError(
                f"{wanted!r} is no open_clip architecture, so its tokenizer is unknown; "
                "name one of open_clip.list_models(): tokenizer('ViT-B-32')"
            )
        return open_clip.get_tokenizer(wanted)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """Move the whole model, the text tower too; returns self."""
        self.full_model.to(device=device, dtype=dtype)
        return self


class OpenClipBackbone(ImageTextBackbone):
    """Adapter of open_clip's own ``VisionTransformer``: [CLS][patches], no registers.

    Tokens are ``ln_post`` of all tokens, before the projection, so CLS and patches lie in one
    space. Towers that norm only what they pooled (CoCa's attention pooling, CLIPA's mean) have
    the tokens of the last block, as their pooling reads them.

    Args:
        module: A whole model with a ``visual``, or a ``VisionTransformer``.
        name: For messages, records and the tokenizer.
        image_size: (height, width) for ``preprocess``; the tower's native size by default.
        positions: How its position table is resized; open_clip's own way by default.

    Raises:
        ValueError: for other towers, non-square patches, and kinds of attention and pooling
            that open_clip itself cannot run or calls untested.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        image_size: tuple[int, int] | None = None,
        positions: PositionResize = OPEN_CLIP,
    ) -> None:
        vit = _tower(module)
        _check_tower(vit, name)
        first = next(iter(vit.transformer.resblocks))
        height, width = vit.image_size
        mean, std = _pixel_statistics(vit, open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        super().__init__(
            vit,
            name=name,
            embed_dim=int(vit.conv1.out_channels),
            num_heads=int(first.attn.num_heads),
            patch_size=int(max(vit.patch_size)),
            image_size=image_size or (int(height), int(width)),
            mean=mean,
            std=std,
        )
        self.vit = vit
        self.full_model = module
        self.positions = positions

    @property
    def norm_after_pooling(self) -> bool:
        """Whether the final norm comes behind the pooling, where it cannot be had for each token."""
        return self.vit.attn_pool is not None or (self.vit.final_ln_after_pool and self.vit.pool_type == "avg")

    def block_sites(self) -> Sequence[BlockSites]:
        """The residual blocks, ``attn`` and ``mlp.c_proj``."""
        return [BlockSites(block, block.attn, block.mlp.c_proj) for block in self.vit.transformer.resblocks]

    def patch_projection(self) -> nn.Module | None:
        """``conv1``, which has no bias."""
        projection: nn.Module = self.vit.conv1
        return projection

    def pool_attention(self) -> nn.Module | None:
        """CoCa's attention pooling; its queries read all N tokens, CLS among them."""
        return None if self.vit.attn_pool is None else self.vit.attn_pool.attn

    def position_table(self) -> nn.Parameter | None:
        """``positional_embedding`` (1 + P, D), CLS row first."""
        table: nn.Parameter = self.vit.positional_embedding
        return table

    def encoder_entrance(self) -> tuple[nn.Module, bool]:
        """The input of ``ln_pre``."""
        return self.vit.ln_pre, True

    def insert_registers(self, registers: Tensor) -> None:
        """By a hook, before ``ln_pre``, as PH-Reg (2505.21501) does.

        Raises:
            ValueError: for a tower that pools other tokens than CLS, as registers would be among them.
        """
        if self.vit.attn_pool is not None or self.vit.pool_type != "tok":
            raise ValueError(f"{self.name}: the tower pools all its tokens, so registers have no place in it")
        insert_by_hook(self, registers)

    def forward_tokens(self, images: Tensor) -> Tensor:
        """The tower's own forward; tokens are read behind its last block: (B, 3, H, W) -> (B, N, D)."""
        seen: list[Tensor] = []
        handle = self.vit.transformer.register_forward_hook(lambda _module, _args, output: seen.append(output))
        try:
            self.vit(images)
        finally:
            handle.remove()
        (tokens,) = seen
        return tokens if self.norm_after_pooling else self.vit.ln_post(tokens)

    def to_joint_space(self, tokens: Tensor) -> Tensor:
        """``ln_post`` and ``proj``: (B, N, D) -> (B, N, E)."""
        if self.norm_after_pooling or self.vit.proj is None:
            return super().to_joint_space(tokens)
        joint: Tensor = self.vit.ln_post(tokens) @ self.vit.proj
        return joint

    def global_vector(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """What the tower pools, in the space of the tokens: CLS, or the mean patch with ``pool_type="avg"``: (B, D).

        CLS for attention pooling too, whose result has another width; see ``image_embedding``.
        """
        if self.vit.attn_pool is None and self.vit.pool_type == "avg":
            return layout.take(tokens, "patches").mean(-2)
        return super().global_vector(tokens, layout)

    def image_embedding(self, features: Features) -> Tensor:
        """What ``encode_image`` gives for these tokens, projected and not normalised: (B, E)."""
        if self.vit.attn_pool is not None:
            first, *others = self.vit.ln_post(self.vit.attn_pool(features.tokens)).unbind(1)  # each (B, E)
            pooled = torch.stack(others).mean(0) if self.vit.pool_type == "avg" else first
        else:
            pooled = self.global_vector(features.tokens, features.layout)
            pooled = self.vit.ln_post(pooled) if self.norm_after_pooling else pooled
        return pooled if self.vit.proj is None else pooled @ self.vit.proj

    @contextmanager
    def prepared(self, image_size: tuple[int, int]) -> Iterator[None]:
        """Any image size, and batch first throughout, so that blocks give (B, N, D)."""
        grid = (image_size[0] // self.patch_size, image_size[1] // self.patch_size)
        table = self.vit.positional_embedding  # (1 + P, D)
        native = tuple(self.vit.grid_size)
        with ExitStack() as stack:
            if not self.vit.transformer.batch_first:
                for part in (self.vit.transformer, *(sites.attn for sites in self.block_sites())):
                    stack.enter_context(swapped_attributes(part, batch_first=True))
            if grid != native:
                resized = resize_positions(table.unsqueeze(0), native, grid, num_prefix_tokens=1, how=self.positions)
                stack.enter_context(swapped_parameter(self.vit, "positional_embedding", resized.squeeze(0)))
            yield

    def attention_backend(self) -> str:
        """The class of the first block's attention."""
        sites, *_ = self.block_sites()
        return type(sites.attn).__name__


class OpenClipTimmBackbone(ImageTextBackbone, TimmBackbone):
    """Adapter of a timm ViT inside open_clip's ``TimmModel``; all but the embedding as in ``TimmBackbone``.

    Args:
        module: A whole model with a ``visual``, or a ``TimmModel``.
        name: For messages, records and the tokenizer.
        image_size: (height, width) for ``preprocess``; the trunk's native size by default.

    Raises:
        ValueError: if the trunk is no timm ViT that ``TimmBackbone`` can read.
    """

    def __init__(self, module: nn.Module, *, name: str, image_size: tuple[int, int] | None = None) -> None:
        visual = _tower(module)
        TimmBackbone.__init__(self, visual.trunk, name=name, image_size=image_size)
        self.mean, self.std = _pixel_statistics(visual, self.mean, self.std)
        self.visual = visual
        self.full_model = module

    def image_embedding(self, features: Features) -> Tensor:
        """What ``encode_image`` gives for these tokens, not normalised: (B, E)."""
        embedding: Tensor = self.visual.head(self.vit.forward_head(features.tokens))
        return embedding


def _tower(module: nn.Module) -> Any:
    return module if isinstance(module, (VisionTransformer, TimmModel)) else getattr(module, "visual", module)


def _check_tower(vit: Any, name: str) -> None:
    if not isinstance(vit, VisionTransformer):
        raise ValueError(
            f"{name}: the image tower is a {type(vit).__name__}; only open_clip's and timm's ViTs can be read"
        )
    if len(set(vit.patch_size)) != 1:
        raise ValueError(f"{name}: patches of {vit.patch_size} px are not square")
    if vit.attn_pool is not None and vit.attn_pool_contrastive is not None:
        raise ValueError(
            f"{name}: {vit.attn_pool_type!r} attention pooling, which open_clip calls untested, is not supported"
        )
    if any(getattr(block.attn, "logit_scale", None) is not None for block in vit.transformer.resblocks):
        raise ValueError(f"{name}: scaled cosine attention cannot be read, as it is no scaled dot product")


def _pixel_statistics(
    visual: Any, mean: Sequence[float], std: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of RGB that the checkpoint wants, else the given ones."""
    config: dict[str, Any] = getattr(visual, "preprocess_cfg", None) or {}
    mean = config.get("mean") or getattr(visual, "image_mean", None) or mean
    std = config.get("std") or getattr(visual, "image_std", None) or std
    return tuple(float(value) for value in mean), tuple(float(value) for value in std)
