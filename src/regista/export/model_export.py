"""Exported models: folders that timm, transformers or onnxruntime read without Regista, checked before they count."""

from __future__ import annotations

import copy
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regista.backbones.bare_library import bare_model, native_size
from regista.backbones.base import Backbone
from regista.backbones.loading import load
from regista.backbones.plain_weights import check_plain_weights, normed_tokens
from regista.backbones.saving import OWN_FILES, put_in_place
from regista.backbones.timm_conversion import as_timm_backbone, notes_on_other_sizes
from regista.export.model_card import ModelCard, card_text
from regista.export.onnx_export import export_onnx
from regista.export.snippets import Loading, loading_snippet, snippet_for
from regista.results.writing import in_words

__all__ = ["Exported", "Format", "export_model", "loading_snippet"]

Format = Literal["auto", "timm", "transformers", "regista", "onnx"]
TOLERANCE = 1e-5  # float32, over the largest token value or one
CARD = "README.md"
ONNX_FILE = "model.onnx"
_ALSO_OURS = (CARD, ONNX_FILE, f"{ONNX_FILE}.data")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        format: "timm", "transformers", "regista" or "onnx".
        paths: The files.
        snippet: Python that loads the model from the folder; see ``loading_snippet`` for the hub.
        notes: What the conversion had to say.
        max_difference: The largest difference between a token of the folder, read back by its library, and the
            backbone's own, on a fixed batch; over the largest token value, or one if that is less.
        loading: What the snippet is made of.
    """

    folder: Path
    format: str
    paths: tuple[Path, ...]
    snippet: str
    notes: tuple[str, ...]
    max_difference: float
    loading: Loading


@dataclass(frozen=True)
class _Written:
    loading: Loading
    notes: tuple[str, ...]
    max_difference: float


def export_model(
    backbone: Backbone,
    folder: str | Path,
    *,
    format: Format = "auto",  # noqa: A002
    card: ModelCard | Mapping[str, Any] | None = None,
    force: bool = False,
) -> Exported:
    """Write a model for others to load, read it back with their library, and compare the tokens.

    Args:
        folder: New or empty; it appears whole or not at all.
        format: "timm" (``timm.create_model("local-dir:FOLDER", pretrained=True)``), "transformers"
            (``AutoModel.from_pretrained``), "onnx" (named outputs, one image size), "regista" (anything that
            ``regista.load`` reads back). "auto": "regista" for a backbone that is more than its weights, else its
            own library, and timm for torch.hub's models.
        card: What README.md says besides how to load the model: see ``ModelCard``.
        force: Replace a model that was exported there before.

    Raises:
        ValueError: for a folder that holds something else; a model that the format cannot express, or that needs
            Regista; or if the tokens that were read back differ by more than 1e-5 (relative to the largest, at
            least one; 1e-4 for ONNX). What was in the folder before is unchanged then.
    """
    kind = _chosen(backbone, format)
    folder = Path(folder).expanduser().absolute()
    _check_folder(folder, force)
    if card is not None:
        card = ModelCard.of(card)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        if kind == "onnx":
            beside.mkdir(parents=True)
        written = _WRITERS[kind](backbone, beside)
        snippet = snippet_for(written.loading, folder)
        if card is not None:
            text = card_text(card, library=kind, snippet=snippet, notes=written.notes)
            (beside / CARD).write_text(text, encoding="utf-8")
        put_in_place(beside, folder)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {in_words(error)}; what was there before is unchanged") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    paths = tuple(sorted(folder.iterdir()))
    return Exported(folder, kind, paths, snippet, written.notes, written.max_difference, written.loading)


def _chosen(backbone: Backbone, wanted: str) -> str:
    if wanted not in get_args(Format):
        raise ValueError(f"format is one of {', '.join(get_args(Format))}, got {wanted!r}")
    if wanted == "auto":
        own = {"timm": "timm", "transformers": "transformers", "dinov2_hub": "timm"}
        wanted = "regista" if getattr(backbone, "needs_regista", None) else own.get(backbone.library, "timm")
    if wanted != "regista":
        check_plain_weights(backbone, f"a folder of the format {wanted!r}")
    return wanted


def check_format(backbone: Backbone, format: Format) -> str:  # noqa: A002
    """What ``export_model`` would write, and its refusals that the kind of model decides, before there are weights.

    Args:
        backbone: Of the same kind as the model that is to be written.

    Raises:
        ValueError: for a model that the format cannot express, or that needs Regista.
    """
    kind = _chosen(backbone, format)
    if kind == "timm":
        as_timm_backbone(backbone)
    elif kind == "transformers":
        _as_transformers(backbone)
    return kind


def _check_folder(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in found if not OWN_FILES.match(name) and name not in _ALSO_OURS]
    if foreign:
        raise ValueError(f"{folder} holds something else than an exported model ({', '.join(foreign[:4])})")
    if found and not force:
        raise ValueError(f"{folder} holds a model already ({', '.join(found[:4])}); force=True (--force) replaces it")


# Formats --------------------------------------------------------------------------------------


def _write_timm(backbone: Backbone, folder: Path) -> _Written:
    converted = as_timm_backbone(backbone)
    converted.save_pretrained(folder)
    written = _compared("timm", backbone, converted, folder)
    return replace(written, notes=tuple(dict.fromkeys([*written.notes, *notes_on_other_sizes(converted)])))


def _as_transformers(backbone: Backbone) -> Backbone:
    try:
        from regista.backbones.transformers_format import to_transformers
    except ImportError as error:
        raise ValueError(f"this needs transformers ({error}); pip install 'regista[transformers]'") from error
    return to_transformers(backbone)


def _write_transformers(backbone: Backbone, folder: Path) -> _Written:
    converted = _as_transformers(backbone)
    converted.save_pretrained(folder)
    return _compared("transformers", backbone, converted, folder)


def _write_regista(backbone: Backbone, folder: Path) -> _Written:
    backbone.save_pretrained(folder)
    again = load(folder, dtype="float32")
    loading = Loading("regista", dict(backbone.layout().segments), backbone.embed_dim, library=backbone.library)
    difference = _difference(
        backbone,
        lambda images: again(images).tokens,
        backbone.layout().image_size,
        lambda model, images: model(images).tokens,
    )
    return _Written(loading, (), difference)


def _write_onnx(backbone: Backbone, folder: Path) -> _Written:
    exported = export_onnx(backbone, folder / ONNX_FILE)
    counts = {name: shape[1] if len(shape) == 3 else 1 for name, shape in exported.outputs.items()}
    return _Written(Loading("onnx", counts, backbone.embed_dim), exported.notes, exported.max_difference)


_WRITERS: dict[str, Callable[[Backbone, Path], _Written]] = {
    "timm": _write_timm,
    "transformers": _write_transformers,
    "regista": _write_regista,
    "onnx": _write_onnx,
}


def _compared(library: str, backbone: Backbone, converted: Backbone, folder: Path) -> _Written:
    """Read a folder with its own library, and compare its tokens with those of the backbone it is of."""
    bare = bare_model(folder, library)
    bare.module.to(backbone.device)

    def wanted(model: Backbone, images: Tensor) -> Tensor:
        tokens = model(images).tokens
        return tokens if converted is backbone or library == "timm" else normed_tokens(model, tokens)

    notes = tuple(converted.notes[len(backbone.notes) :]) if converted is not backbone else ()
    difference = _difference(backbone, bare.forward, bare.native_size, wanted, notes)
    layout = converted.layout(native_size(converted))
    loading = Loading(library, dict(layout.segments), converted.embed_dim, bare.expression)
    return _Written(loading, (*converted.notes, *_size_note(backbone, bare.native_size, library)), difference)


def _size_note(backbone: Backbone, native: tuple[int, int], library: str) -> list[str]:
    """A note if the library reads images at another size than the backbone was used at."""
    own = backbone.layout().image_size
    if own == native:
        return []
    there, here = (f"{height}x{width} pixels" for height, width in (native, own))
    return [f"{library} loads it at its native {there}; here it was used at {here}"]


@torch.no_grad()
def _difference(
    backbone: Backbone,
    found: Callable[[Tensor], Tensor],
    size: tuple[int, int],
    wanted: Callable[[Backbone, Tensor], Tensor],
    notes: Sequence[str] = (),
) -> float:
    """Over two seeded images of noise.

    Raises:
        ValueError: if it is too large, with the notes of the conversion, which may tell why.
    """
    exact = all(value.dtype == torch.float32 for value in backbone.module.parameters())
    reference = backbone if exact else copy.deepcopy(backbone).to(dtype=torch.float32)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).to(backbone.device)
    own, got = wanted(reference, images), found(images)
    if got.shape != own.shape:
        raise ValueError(f"{backbone.name}: {tuple(got.shape)} tokens were read back, wanted {tuple(own.shape)}")
    difference = float((got - own).abs().max()) / max(1.0, float(own.abs().max()))
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{backbone.name}: the tokens that were read back differ by {difference:.1e}, wanted {TOLERANCE:.0e}; "
            "nothing was kept" + (f". What the conversion noted: {'; '.join(notes)}" if notes else "")
        )
    return difference
