"""Let pytorch-grad-cam and torchcam read ViT tokens as maps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.loading import load


def reshape_transform(
    model: Backbone | nn.Module, image_size: tuple[int, int] | None = None
) -> Callable[[Tensor], Tensor]:
    """The ``reshape_transform`` argument of pytorch-grad-cam for any supported ViT.

    Args:
        model: A backbone, or a live module that ``regista.load`` takes.
        image_size: (height, width) of the images; the model's own by default. Any grid,
            any number of prefix tokens.

    Returns:
        Function from a layer's tokens (B, N, D) to (B, D, rows, cols), CLS and registers left
        out; it raises ``ValueError`` with both numbers if the tokens are of another size.

    Example:
        >>> GradCAM(model, [model.blocks[-1].norm1], reshape_transform=reshape_transform(model))  # doctest: +SKIP
    """
    layout = load(model).layout(image_size)

    def transform(tokens: Tensor) -> Tensor:
        if isinstance(tokens, tuple):
            tokens, *_ = tokens
        return layout.patch_map(tokens)

    return transform
