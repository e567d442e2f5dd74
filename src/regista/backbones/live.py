"""From a live module to the adapter of its library."""

from __future__ import annotations

from torch import nn

from regista.backbones.base import Backbone
from regista.backbones.dinov2_hub import is_dinov2_hub
from regista.registry import Registry

ACCEPTED = (
    "timm VisionTransformer and Eva · transformers Dinov2Model, Dinov2WithRegistersModel, DINOv3ViTModel, ViTModel, "
    "CLIPVisionModel, SiglipVisionModel and models that hold one · open_clip models with a ViT tower · torchvision "
    "VisionTransformer · torch.hub's DinoVisionTransformer of DINOv2"
)
# By the package a class is from. Other packages join under this entry point group.
ADAPTERS = Registry(
    "adapter",
    {
        "timm": "regista.backbones.live:from_timm",
        "transformers": "regista.backbones.live:from_transformers",
        "open_clip": "regista.backbones.live:from_open_clip",
        "torchvision": "regista.backbones.live:from_torchvision",
        "DinoVisionTransformer": "regista.backbones.live:from_dinov2_hub",
    },
    entry_point_group="regista.adapters",
)
Size = tuple[int, int]


def from_module(module: nn.Module, *, name: str | None = None, image_size: Size | None = None) -> Backbone:
    """Wrap a live module; it is used as it is and never changed.

    Args:
        module: See ``ACCEPTED``. ``torch.compile``'s wrapper, ``DataParallel`` and
            ``DistributedDataParallel`` are taken off.

    Raises:
        ValueError: for any other class, and for modules that are compiled inside, where hooks
            would not run.
    """
    bare = unwrapped(module)
    for kind in type(bare).__mro__:
        for known in (kind.__name__, kind.__module__.partition(".")[0]):
            if known in ADAPTERS:
                backbone: Backbone = ADAPTERS.get(known)(bare, name=name or type(bare).__name__, image_size=image_size)
                return backbone
    if is_dinov2_hub(bare):  # a classifier around it, or a class of another name
        return from_dinov2_hub(bare, name=name or type(bare).__name__, image_size=image_size)
    inner = next((type(child).__name__ for child in bare.children() if _fits(child)), None)
    advice = f"; hand over the {inner} inside it, and normalise with preprocess" if inner else ""
    raise ValueError(f"a {type(bare).__name__} is not a ViT that can be looked into{advice}. Accepted: {ACCEPTED}")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s and the data-parallel wrappers.

    Raises:
        ValueError: if it is sharded, or if it or a part of it is compiled in place.
    """
    while True:
        if "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            break
    for path, child in module.named_modules():
        what = f"its part {path!r}" if path else "it"
        if type(child).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            raise ValueError(f"{what} is sharded ({type(child).__name__}); save a full state dict and load that")
        if "_orig_mod" in child._modules or getattr(child, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{type(module).__name__}: {what} is compiled, and hooks do not run in compiled code; hand over the "
                "model before torch.compile or module.compile(), and compile it afterwards"
            )
    return module


def from_timm(module: nn.Module, *, name: str, image_size: Size | None = None) -> Backbone:
    """Adapter for timm."""
    from regista.backbones.timm import TimmBackbone

    return TimmBackbone(module, name=name, image_size=image_size)


def from_transformers(module: nn.Module, *, name: str, image_size: Size | None = None) -> Backbone:
    """Adapter for transformers."""
    from regista.backbones.transformers import TransformersBackbone

    return TransformersBackbone(module, name=name, image_size=image_size)


def from_open_clip(module: nn.Module, *, name: str, image_size: Size | None = None) -> Backbone:
    """Adapter for open_clip."""
    from regista.backbones.open_clip import open_clip_backbone

    return open_clip_backbone(module, name=name, image_size=image_size)


def from_torchvision(module: nn.Module, *, name: str, image_size: Size | None = None) -> Backbone:
    """Adapter for torchvision."""
    from regista.backbones.torchvision import TorchvisionBackbone

    return TorchvisionBackbone(module, name=name, image_size=image_size)


def from_dinov2_hub(module: nn.Module, *, name: str, image_size: Size | None = None) -> Backbone:
    """Adapter for torch.hub's DINOv2, whose code is a clone of its repository."""
    from regista.backbones.dinov2_hub import Dinov2HubBackbone

    return Dinov2HubBackbone(module, name=name, image_size=image_size)


def _fits(module: nn.Module) -> bool:
    try:
        from_module(module)
    except ValueError:
        return False
    return True
