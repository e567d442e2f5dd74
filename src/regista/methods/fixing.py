"""``regista.fix``: from a sick backbone to a cured one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from regista.backbones.base import Backbone
from regista.backbones.loading import load
from regista.methods.protocol import Progress, Workspace, method_class
from regista.methods.settings import configured, plain_config


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
        A new backbone. Its ``history`` says what was done; ``save_pretrained`` writes it.

    Raises:
        ValueError: for an unknown method or setting, images that are missing or cannot be used,
            and models that the method cannot treat.
    """
    kind = method_class(method)
    chosen = kind(configured(kind.config_class, config, what=f"method {kind.name!r}"))
    backbone = load(backbone)
    if chosen.needs_images and images is None:
        raise ValueError(f"method {kind.name!r} needs images: fix(backbone, {kind.name!r}, images)")
    if isinstance(images, Iterator):  # a method may look at them more than once
        images = list(images)
    if isinstance(workspace, (str, Path)):
        workspace = Workspace(Path(workspace))
    state = chosen.fit(backbone, images, progress=progress, workspace=workspace)
    fixed = chosen.apply(backbone, state)
    fixed.history = [
        *backbone.history,
        {"method": kind.name, "config": plain_config(chosen.config), "state": state.record},
    ]
    fixed.name = f"{backbone.name}+{kind.name}"
    fixed.planted = None  # its truth is about the weights as they were
    return fixed
