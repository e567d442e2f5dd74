"""Folders of models that only Regista can build: those with something added, of any library.

``config.json`` names no model, so that timm and transformers refuse the folder by name instead of
loading it without what was added. What their own configuration would be lies in ``regista.json``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from regista.backbones.additions import Addition, add_from_records
from regista.backbones.base import Backbone
from regista.backbones.checkpoint_files import read_state_dict
from regista.backbones.live import from_module
from regista.backbones.meta_build import to_be_filled
from regista.backbones.weights import load_strict

WEIGHTS = "model.safetensors"
FOREIGN_CONFIG = {
    "architecture": "needs-regista",
    "model_type": "needs-regista",
    "note": "this model works only through regista.load(FOLDER)",
}


def build_record(backbone: Backbone) -> dict[str, Any]:
    """What builds the module again and puts the additions into it, as plain values.

    Raises:
        ValueError: for models of a library that has no configuration to build them from.
    """
    writers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "timm": _timm_build,
        "transformers": _transformers_build,
        "open_clip": _open_clip_build,
    }
    writer = writers.get(backbone.library)
    if writer is None:
        raise ValueError(
            f"{backbone.name}: models of {backbone.library or type(backbone).__name__} with additions are not saved; "
            "take the same weights through timm or transformers, and fix that model"
        )
    return {"build": writer(backbone), "additions": [addition.to_record() for addition in backbone.additions]}


def write_weights(backbone: Backbone, folder: Path) -> None:
    """``model.safetensors`` with everything the whole model has, additions too."""
    state = whole_module(backbone).state_dict()
    own = {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
    save_file(own, folder / WEIGHTS, metadata={"format": "pt"})


def whole_module(backbone: Backbone) -> nn.Module:
    """The module that is saved: with the text tower where there is one."""
    whole: nn.Module = getattr(backbone, "full_model", backbone.module)
    return whole


def read_own_folder(folder: Path, record: dict[str, Any], *, allow_partial: bool = False) -> Backbone:
    """Build the module, put in what was added, fill it.

    Raises:
        ValueError: if the record makes no sense here, or weights are missing ("loaded n of m").
    """
    build = record["build"]
    builders: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
        "timm": _build_timm,
        "transformers": _build_transformers,
        "open_clip": _build_open_clip,
    }
    builder = builders.get(str(build.get("library")))
    if builder is None:
        raise ValueError(f"{folder}: models of {build.get('library')!r} are unknown; update Regista")
    with to_be_filled(not allow_partial):
        module = builder(build)
    backbone = from_module(module, name=str(build.get("name", folder)))
    add_from_records(backbone, list(record.get("additions", [])))
    report = load_strict(whole_module(backbone), read_state_dict(folder), allow_partial, name=str(folder))
    whole_module(backbone).eval()
    backbone.notes.append(f"{folder}: {report}")
    return backbone


# Libraries ------------------------------------------------------------------------------------


def _timm_build(backbone: Any) -> dict[str, Any]:
    from regista.backbones.timm_format import timm_config

    bare = copy.copy(backbone)
    bare.module = bare.vit = _without_additions(backbone.module)
    return {"library": "timm", "config": timm_config(bare)}


def _build_timm(build: dict[str, Any]) -> nn.Module:
    import timm

    config = build["config"]
    module: Any = timm.create_model(
        config["architecture"],
        pretrained=False,
        num_classes=config["num_classes"],
        global_pool=config["global_pool"],
        pretrained_cfg_overlay={
            key: value for key, value in config["pretrained_cfg"].items() if key in ("input_size", "mean", "std")
        },
        **{key: value for key, value in config["model_args"].items() if key not in ("num_classes", "global_pool")},
    )
    return module  # type: ignore[no-any-return]


def _transformers_build(backbone: Any) -> dict[str, Any]:
    from transformers import PreTrainedModel

    whole = backbone.full_model
    if not isinstance(whole, PreTrainedModel):
        raise ValueError(
            f"{backbone.name}: a {type(whole).__name__} is not saved; give the transformers model inside it"
        )
    return {"library": "transformers", "class": type(whole).__name__, "config": whole.config.to_dict()}


def _build_transformers(build: dict[str, Any]) -> nn.Module:
    import transformers

    kind: Any = getattr(transformers, str(build["class"]), None)
    config_class: Any = getattr(kind, "config_class", None)
    if config_class is None:
        raise ValueError(f"transformers {transformers.__version__} has no model class {build['class']!r}")
    config = config_class.from_dict(build["config"])
    module: Any = kind(config)
    return module  # type: ignore[no-any-return]


def _open_clip_build(backbone: Any) -> dict[str, Any]:
    import open_clip

    architecture = backbone.name.removeprefix("open_clip/").partition("/")[0].partition("+")[0].partition("@")[0]
    config = open_clip.get_model_config(architecture)
    if config is None or whole_module(backbone) is backbone.module:
        raise ValueError(
            f"{backbone.name}: which open_clip architecture it is cannot be told from its name; load it as "
            "open_clip/ARCH/TAG and fix that model"
        )
    quick = any(type(part).__name__ == "QuickGELU" for part in backbone.module.modules())
    return {"library": "open_clip", "name": f"open_clip/{architecture}", "architecture": architecture, "quick": quick}


def _build_open_clip(build: dict[str, Any]) -> nn.Module:
    import open_clip

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # open_clip warns that it has loaded no weights
    try:
        module: nn.Module = open_clip.create_model(build["architecture"], force_quick_gelu=bool(build["quick"]))
    finally:
        logging.disable(before)
    return module


def _without_additions(module: nn.Module) -> nn.Module:
    """The same module object but for its additions, to be looked at only."""
    bare = copy.copy(module)
    bare._modules = {name: child for name, child in module._modules.items() if not isinstance(child, Addition)}
    return bare
