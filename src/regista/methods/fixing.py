"""``regista.fix``: from a sick backbone to a cured one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.loading import load
from regista.backbones.weights import check_finite
from regista.data.images import find_images, skipped_files
from regista.methods.protocol import Method, Progress, Workspace, method_class
from regista.methods.settings import configured, plain_config

FEW_IMAGES = 10  # a cure that is fitted on fewer comes with a caution


def fix(
    backbone: Backbone | nn.Module | str,
    method: str,
    images: Any = None,
    *,
    progress: Progress | None = None,
    workspace: Workspace | str | Path | None = None,
    **config: Any,
) -> Backbone:
    """Cure a ViT.

    Args:
        backbone: From ``regista.load``, or what it takes; it stays as it is.
        method: "test_time", "phreg", "trained" ...; see ``regista.methods``.
        images: Photos to fit on, as ``regista.diagnose`` takes them; not for every method.
        progress: Called with (what, done, of).
        workspace: Folder in which a method that trains keeps targets and checkpoints, to go on from; a
            temporary one if None.
        **config: Settings of the method; see its ``config.py``.

    Returns:
        A new backbone. Its ``history`` says what was done, its ``notes`` end with what to be careful
        about; ``save_pretrained`` writes it.

    Raises:
        ValueError: for an unknown method or setting, images that are missing or cannot be used, weights
            that are not finite, and models that the method cannot treat.
    """
    chosen = chosen_method(method, config)
    backbone = load(backbone)
    if chosen.needs_images and images is None:
        raise ValueError(f"method {chosen.name!r} needs images: fix(backbone, {chosen.name!r}, images)")
    check_finite(backbone.module.state_dict().items(), backbone.name)
    if isinstance(images, Iterator):  # a method may look at them more than once
        images = list(images)
    if isinstance(workspace, (str, Path)):
        workspace = Workspace(Path(workspace))
    with skipped_files() as skipped:
        state = chosen.fit(backbone, images, progress=progress, workspace=workspace)
    fixed = chosen.apply(backbone, state)
    fixed.history = [
        *backbone.history,
        {"method": chosen.name, "config": plain_config(chosen.config), "state": state.record},
    ]
    fixed.name = f"{backbone.name}+{chosen.name}"
    fixed.planted = None  # its truth is about the weights as they were
    on_images = images_notes(images, skipped) if chosen.needs_images else []
    fixed.notes = [*fixed.notes, *state.notes, *on_images, *register_notes(backbone, fixed)]
    return fixed


def chosen_method(name: str, settings: Mapping[str, Any]) -> Method:
    """A method with its settings, before any model or image is there.

    Raises:
        ValueError: for an unknown method or setting, a value that it refuses, or a setting that has no effect
            beside the others.
    """
    kind = method_class(name)
    method = kind(configured(kind.config_class, settings, what=f"method {kind.name!r}"))
    unused = method.unused(list(settings))
    if unused:
        raise ValueError(f"method {kind.name!r} has no use for {', '.join(unused)} beside {_words(settings, unused)}")
    return method


def images_notes(images: Any, skipped: Mapping[str, str]) -> list[str]:
    """What to say of the images that a cure was fitted on."""
    notes = [f"skipped {path}: {reason}" for path, reason in skipped.items()]
    count = _count(images) - len(skipped)
    if count < FEW_IMAGES:
        what = "one image" if count == 1 else f"{count} images"
        notes.append(f"fitted on {what} only: use a few dozen of the kind you care about")
    return notes


def register_notes(before: Backbone, after: Backbone) -> list[str]:
    """A caution if registers outnumber the patches."""
    layout = after.layout()
    more = layout.num_register_tokens > before.layout().num_register_tokens
    patches = layout.grid_size[0] * layout.grid_size[1]
    if not more or layout.num_register_tokens <= patches:
        return []
    return [f"{layout.num_register_tokens} registers beside {patches} patches: 1 to 16 are usual"]


def _words(settings: Mapping[str, Any], unused: list[str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name not in unused)


def _count(images: Any) -> int:
    if isinstance(images, (str, Path)):
        images = [images]
    if isinstance(images, (list, tuple)) and all(isinstance(image, (str, Path)) for image in images):
        return len(find_images(images))
    if isinstance(images, (list, tuple)) or (isinstance(images, Tensor) and images.ndim == 4):
        return len(images)
    return 1  # a picture or an array
