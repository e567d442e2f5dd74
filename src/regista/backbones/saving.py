"""Writing a backbone to a folder that its own library can read too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from regista.backbones.base import Backbone
from regista.backbones.meta_build import shapes_only
from regista.backbones.model_record import FILE, record_of
from regista.backbones.own_format import FOREIGN_CONFIG, build_record, write_weights
from regista.results.writing import in_words

OWN_FILES = re.compile(
    r"^(config\.json|regista\.json|preprocessor_config\.json|generation_config\.json|"
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?)$"
)


def save_pretrained(backbone: Backbone, folder: str | Path) -> Path:
    """Write weights, configuration and ``regista.json``, so that ``regista.load(folder)`` gives the same tokens.

    A model with something added is written in a format that only Regista reads (the folder says so to
    the others). Else a timm model is written in timm's hub format (``timm.create_model("local-dir:FOLDER",
    pretrained=True)`` reads it), a transformers model by its own ``save_pretrained``. The folder
    appears whole or not at all.

    Returns:
        The folder.

    Raises:
        ValueError: for models of other libraries; for one that its library could not build again;
            for a folder that holds anything else than a model saved before; and if it cannot
            be written (disk full ...).
    """
    folder = Path(folder).expanduser()
    record = record_of(backbone)
    writers: dict[str, Callable[[Any, Path], None]] = {"timm": _write_timm, "transformers": _write_transformers}
    write = _write_own if backbone.additions else writers.get(backbone.library)
    if write is None:
        raise ValueError(
            f"{backbone.name}: models of {backbone.library or type(backbone).__name__} are not saved as they are; "
            "only those of timm and transformers are. Convert the weights to one of them first"
        )
    record |= build_record(backbone) if backbone.additions else {}
    _check_target(folder)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        beside.mkdir(parents=True)
        write(backbone, beside)
        _write_json(beside / FILE, record)
        _flush(beside)
        put_in_place(beside, folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {folder}: {in_words(error)}; what was there before is unchanged") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _write_own(backbone: Any, folder: Path) -> None:
    _write_json(folder / "config.json", FOREIGN_CONFIG)
    write_weights(backbone, folder)


def _write_timm(backbone: Any, folder: Path) -> None:
    from regista.backbones.timm_format import timm_config

    _write_json(folder / "config.json", timm_config(backbone))
    state = {key: value.detach().cpu().contiguous() for key, value in backbone.module.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _write_transformers(backbone: Any, folder: Path) -> None:
    from transformers import PreTrainedModel

    from regista.backbones.sources import quiet_transformers

    module: Any = backbone.full_model if isinstance(backbone.full_model, PreTrainedModel) else backbone.module
    with shapes_only():
        built = type(module)(module.config).state_dict()
    own = module.state_dict()
    odd = [key for key in {**own, **built} if key not in own or key not in built or own[key].shape != built[key].shape]
    odd = [key for key in odd if not key.startswith("pooler.")]
    if odd:
        raise ValueError(f"{backbone.name}: its configuration would build another model, with other {odd[:3]}")
    with quiet_transformers():
        module.save_pretrained(folder)
    height, width = backbone.image_size
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(backbone.mean),
        "image_std": list(backbone.std),
    }
    _write_json(folder / "preprocessor_config.json", preprocessor)


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in found if not OWN_FILES.match(name)]
    if foreign or (found and FILE not in found):
        raise ValueError(
            f"{folder} holds something else than a model saved by Regista ({', '.join((foreign or found)[:4])}); "
            "nothing was written, give another folder"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        with contextlib.suppress(PermissionError):  # folders cannot be opened everywhere
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def put_in_place(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; what was there goes only when the new one stands."""
    if not folder.exists():
        new.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
