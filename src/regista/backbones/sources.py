"""Models by the names that timm, transformers and open_clip give them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regista.backbones.base import Backbone
from regista.backbones.checkpoint_files import read_state_dict
from regista.backbones.hub_access import reaching_hub
from regista.backbones.meta_build import shapes_only, to_be_filled
from regista.backbones.timm import TimmBackbone
from regista.backbones.timm_files import backbone_from_file
from regista.backbones.weights import LoadReport, check_finite, choose_part, load_strict

Size = tuple[int, int]


def from_timm_name(rest: str, *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "timm/NAME" with its pretrained weights, or "timm/NAME@FILE" with those of a file.

    Raises:
        ValueError: for a name timm does not know or has no weights for (with near spellings), an
            architecture that cannot be looked into, and weights that cannot be had or do not fit.
    """
    import timm

    name, has_file, file = rest.partition("@")
    check_timm_name(name, pretrained=not has_file)
    spec = f"timm/{rest}"
    create = partial(timm.create_model, name, pretrained=False)
    if has_file:
        tensors = read_state_dict(Path(file).expanduser())
        return backbone_from_file(
            create, tensors, name=spec, source=file, image_size=image_size, allow_partial=allow_partial
        )
    with shapes_only():
        probe: Any = create()
    TimmBackbone(probe, name=spec)  # refuses what cannot be looked into before it is fetched
    strict = not probe.pretrained_cfg.get("custom_load")  # timm then raises if anything is missing
    with reaching_hub(spec, f", or give a file of weights: timm/{name}@FILE"), to_be_filled(strict):
        module = timm.create_model(name, pretrained=True)
    return _whole_timm(module, spec, image_size)


def from_timm_hub(rest: str, *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "hf-hub:org/name", a repository in timm's format; ``regista.json`` in it is heeded."""
    import timm

    from regista.backbones.model_record import FILE, apply_record, read_record

    spec = f"hf-hub:{rest}"
    with reaching_hub(spec):
        module = timm.create_model(spec, pretrained=True)
        record = _file_in_repository(rest, FILE)
    backbone = _whole_timm(module, spec, None)
    if record is not None:
        apply_record(backbone, read_record(record))
    backbone.image_size = image_size or backbone.image_size
    return backbone


def from_transformers_hub(rest: str, *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "hf/org/name" or "hf/org/name@revision", a repository of transformers."""
    spec = f"hf/{rest}"
    return load_transformers(rest, name=spec, image_size=image_size, allow_partial=allow_partial)


def load_transformers(
    source: str | Path, *, name: str, image_size: Size | None = None, allow_partial: bool = False
) -> Backbone:
    """Load a transformers ViT from the hub (a name) or a folder (a path), in float32, strictly.

    Raises:
        ValueError: without transformers, or for another kind of model, or weights that are not
            there or do not fit.
    """
    transformers = _library("transformers", "transformers")
    from regista.backbones.transformers import TransformersBackbone

    where, local = str(source), isinstance(source, Path)
    where, _, revision = (where, "", "") if local else where.partition("@")
    origin = {"revision": revision or "main", "trust_remote_code": False}
    with reaching_hub(name, local=local), quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(where, **origin)
        with shapes_only():
            probe = transformers.AutoModel.from_config(config, trust_remote_code=False)
    TransformersBackbone(probe, name=name)  # refuses what cannot be looked into before it is fetched
    with reaching_hub(name, local=local), quiet_transformers(), torch.random.fork_rng(devices=[]):
        module, found = transformers.AutoModel.from_pretrained(
            where, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **origin
        )
        mean, std = _normalisation(where, origin)
    if any(key.startswith("pooler.") for key in found["missing_keys"]):
        module.pooler = None  # random, and no token passes through it
    state = module.state_dict()
    misshaped = sorted((key, tuple(got), tuple(wanted)) for key, got, wanted in found["mismatched_keys"])
    missing = (set(found["missing_keys"]) & set(state)) - {key for key, _, _ in misshaped}
    report = LoadReport(
        loaded=len(state) - len(missing) - len(misshaped),
        total=len(state),
        missing=tuple(sorted(missing)),
        misshaped=tuple(misshaped),
        left_out=tuple(sorted(found["unexpected_keys"])),
    )
    if not report.complete and not allow_partial:
        raise ValueError(f"{name}: {report}; --allow-partial (allow_partial=True) loads what fits")
    if not allow_partial:
        check_finite(state.items(), name)
    backbone = TransformersBackbone(module.eval(), name=name, image_size=image_size, mean=mean, std=std)
    backbone.notes.append(f"{name}: {report}")
    return backbone


def from_open_clip_name(rest: str, *, image_size: Size | None = None, allow_partial: bool = False) -> Backbone:
    """Load "open_clip/ARCH/TAG" with the weights of that tag, or "open_clip/ARCH@FILE" with those of a file.

    Raises:
        ValueError: without open_clip, for an unknown architecture or tag (with those there are), or
            weights that cannot be had or do not fit.
    """
    open_clip = _library("open_clip", "open-clip")
    from regista.backbones.open_clip import open_clip_backbone

    spec = f"open_clip/{rest}"
    name, has_file, file = rest.partition("@")
    name, _, tag = (name, "", "") if has_file else name.partition("/")
    if name not in open_clip.list_models():
        raise ValueError(f"{spec}: open_clip has no architecture {name!r}{_near(name, open_clip.list_models())}")
    if has_file:
        with to_be_filled(not allow_partial):
            module = open_clip.create_model(name)
        notes = _fill(module, Path(file).expanduser(), allow_partial)
    else:
        module = _open_clip_with_tag(open_clip, name, tag, spec)
        notes = [f"{spec}: loaded all {len(module.state_dict())} tensors"]
        check_finite(module.state_dict().items(), spec)
    backbone = open_clip_backbone(module.eval(), name=spec, image_size=image_size)
    backbone.notes += notes
    return backbone


def _open_clip_with_tag(open_clip: Any, name: str, tag: str, spec: str) -> Any:
    tags = open_clip.list_pretrained_tags_by_model(name)
    trained = open_clip.get_pretrained_cfg(name, tag)
    if not trained:
        shown = ", ".join(tags[:6]) + (f" and {len(tags) - 6} more" if len(tags) > 6 else "") or "none"
        raise ValueError(f"{spec}: {name} has no weights {tag!r}{_near(tag, tags)}; open_clip/{name}/TAG has {shown}")
    built = bool(open_clip.get_model_config(name).get("quick_gelu", False))
    quick = bool(trained.get("quick_gelu", False))
    if built and not quick:
        raise ValueError(f"{spec}: these weights were trained with GELU; use the architecture without -quickgelu")
    with reaching_hub(spec, f", or give a file of weights: open_clip/{name}@FILE"):
        return open_clip.create_model(name, pretrained=tag, force_quick_gelu=quick)


def _fill(module: Any, file: Path, allow_partial: bool) -> list[str]:
    """Load a file into a module that has the file's own names."""
    wanted = {key: value.shape for key, value in module.state_dict().items()}
    part = choose_part(
        read_state_dict(file),
        [next(iter(wanted))],
        lambda state: (sum(wanted.get(key) == value.shape for key, value in state.items()),),
    )
    return [f"{file}: {load_strict(module, part.state, allow_partial, name=str(file))}", *part.notes]


def _whole_timm(module: Any, spec: str, image_size: Size | None) -> TimmBackbone:
    """Wrap what timm has loaded; it is strict itself where the classes are the checkpoint's own."""
    check_finite(module.state_dict().items(), spec)
    backbone = TimmBackbone(module.eval(), name=spec, image_size=image_size)
    backbone.notes.append(f"{spec}: loaded all {len(module.state_dict())} tensors")
    return backbone


def check_timm_name(name: str, *, pretrained: bool) -> None:
    """Raise ``ValueError`` with near spellings if timm has no such architecture, or no such weights."""
    from timm.models import is_model, is_model_pretrained, list_models, list_pretrained

    if not is_model(name):
        raise ValueError(f"timm has no model {name!r}{_near(name, [*list_pretrained(), *list_models()])}")
    if not pretrained or is_model_pretrained(name):
        return
    architecture = name.partition(".")[0]
    tagged = list_pretrained(f"{architecture}.*")
    if tagged:
        raise ValueError(f"timm has no weights {name!r}; for this architecture it has {', '.join(tagged)}")
    raise ValueError(
        f"timm has no pretrained weights for {name!r}{_near(name, list_pretrained())}; give a file: timm/{name}@FILE"
    )


def _near(name: str, known: list[str]) -> str:
    found = get_close_matches(name, known, n=3, cutoff=0.7)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        advice = f"pip install 'regista[{extra}]'"
        raise ValueError(f"this needs {module}, which cannot be imported ({error}); {advice}") from error


def _file_in_repository(repository: str, file: str) -> Path | None:
    """A file of a hub repository, fetched if need be; None if it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        return Path(hf_hub_download(name, file, revision=revision or None))
    except EntryNotFoundError:
        return None


def _normalisation(source: str, origin: dict[str, Any]) -> tuple[list[float] | None, list[float] | None]:
    """``image_mean`` and ``image_std`` of a checkpoint's preprocessor, where it has one."""
    try:
        processor = _library("transformers", "transformers").AutoImageProcessor.from_pretrained(source, **origin)
    except (OSError, ValueError, ImportError, KeyError):
        return None, None
    return getattr(processor, "image_mean", None), getattr(processor, "image_std", None)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars of transformers, which it shows also where there is no terminal."""
    logging: Any = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
