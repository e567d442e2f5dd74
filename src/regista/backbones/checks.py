"""What goes into a forward pass, checked, and who is to blame when something not finite comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

Reduce = Callable[[Tensor], Tensor]


def checked_images(images: Any) -> Tensor:
    """Preprocessed images (B, 3, H, W), as they are.

    Raises:
        ValueError: for anything else, an empty batch, integers, and NaN or infinite pixels.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] != 3:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a (B, 3, H, W) tensor, got {got}; backbone.preprocess makes one")
    if not len(images):
        raise ValueError("got an empty batch of images")
    if not images.is_floating_point():
        raise ValueError(f"images must be preprocessed floats, got {images.dtype}; call backbone.preprocess first")
    if not images.is_meta:
        finite = torch.isfinite(images).flatten(1).all(1)
        if not finite.all():
            raise ValueError(f"NaN or infinite pixels in image {int((~finite).nonzero().flatten().tolist().pop(0))}")
    return images


def raise_not_finite(backbone: Backbone, run: Callable[[Mapping[str, Reduce]], Mapping[str, Tensor]]) -> NoReturn:
    """Say in a ``ValueError`` where NaN or infinity first came up: weights, or block and image.

    Args:
        run: Forwards the images once more, from sites to what they captured.
    """
    for name, parameter in backbone.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"{backbone.name}: NaN or infinite values in the weights {name!r}")
    with torch.no_grad():
        captured = run({f"blocks.{block}.resid": _finite_images for block in range(backbone.depth)})
    for site, ok in captured.items():
        if not ok.all():
            image = int((~ok).nonzero().flatten().tolist().pop(0))
            raise ValueError(
                f"{backbone.name}: NaN or infinite activations in {site}, first in image {image} of the batch"
            )
    raise ValueError(f"{backbone.name}: NaN or infinite activations in the final norm")


def asked_sites(capture: Any) -> dict[str, Reduce]:
    """{site: function} from a site's name, several, or {site: function}.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(capture, str):
        capture = (capture,)
    if not isinstance(capture, Iterable):
        raise ValueError(f"capture is a site's name, several, or {{site: function}}, got {capture!r}")
    wanted = dict(capture) if isinstance(capture, Mapping) else dict.fromkeys(capture, _keep)
    wrong = [site for site, reduce in wanted.items() if not isinstance(site, str) or not callable(reduce)]
    if wrong:
        raise ValueError(f"capture is a site's name, several, or {{site: function}}; wrong at {wrong}")
    return wanted


def _keep(value: Tensor) -> Tensor:
    return value


def _finite_images(tokens: Tensor) -> Tensor:
    return torch.isfinite(tokens).flatten(1).all(1)
