"""Reading weight files: tensors and nothing else, and one clear error for anything that is not whole.

Pickles are opened with ``weights_only=True`` alone, so that no code in them ever runs.
"""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
INDEX_SUFFIX = ".index.json"
IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pth",
    "model.pth",
)
_LFS_POINTER = b"version https://git-lfs"
_MAX_DEPTH = 8


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a weight file, on the CPU, under their names in the file.

    Nested dictionaries become dotted names: ``{"teacher": {"norm.weight": x}}`` is
    ``{"teacher.norm.weight": x}``. Numbers, settings and optimiser lists are passed over.

    Args:
        path: A .safetensors file; a .pth, .pt, .bin, .ckpt or .tar written by ``torch.save``; the
            ``....index.json`` of a file in shards; or a folder with one of these.

    Raises:
        ValueError: for a file that is missing, empty, cut short, of another kind, or a pickle
            that would have to run code.
    """
    path = Path(path)
    if path.is_dir():
        path = weight_file(path)
    if not path.is_file():
        raise ValueError(f"there is no weight file {path}")
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path)
    _check_beginning(path)
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    if not state:
        raise ValueError(f"{path}: no tensors in it, so it holds no weights")
    return state


def weight_file(folder: Path) -> Path:
    """The file in a folder that holds the weights, or the index of its shards.

    Raises:
        ValueError: if there is none, or several and none of them has a usual name.
    """
    for name in IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    found = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", *PICKLES))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{folder}: wanted one weight file ({', '.join(IN_FOLDERS)}), found {names}")
    return found.pop()


def _check_beginning(path: Path) -> None:
    known = (".safetensors", *PICKLES)
    if path.suffix not in known:
        raise ValueError(f"{path}: weight files are {', '.join(known)} or a shard index, got {path.suffix!r}")
    with path.open("rb") as file:
        beginning = file.read(len(_LFS_POINTER))
    if not beginning:
        raise ValueError(f"{path} is empty; copy or download it again")
    if beginning == _LFS_POINTER:
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` where it is from")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, "safetensors", error) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with _training_arguments_allowed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript archives, which are told below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        needed = _unsafe_globals(path)
        if not needed and "Unsupported global" not in str(error):
            raise ValueError(f"{path} is not a whole torch.save file; save a state dict as safetensors") from error
        raise ValueError(
            f"{path}: this pickle would have to run code to open ({', '.join(needed) or 'unknown classes'}), which is "
            "never done; where you trust it, save its state dict alone as safetensors, with "
            "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, AttributeError, TypeError) as error:
        if "TorchScript" in str(error):
            raise ValueError(
                f"{path} is a TorchScript archive; save torch.jit.load(path).state_dict() as safetensors"
            ) from error
        raise _damaged(path, "torch.save", error) from error
    return dict(_tensors(content, ""))


def _damaged(path: Path, kind: str, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a whole {kind} file ({_first_line(error)}); copy or download it again")


def _training_arguments_allowed() -> AbstractContextManager[Any]:
    """DINO and timm keep an ``argparse.Namespace``, plain values, beside their weights."""
    allow = getattr(torch.serialization, "safe_globals", None)
    return nullcontext() if allow is None else allow([argparse.Namespace])


def _unsafe_globals(path: Path) -> list[str]:
    """Names of the code a pickle asks for; empty if it cannot be read at all."""
    try:
        with _training_arguments_allowed():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # a damaged file fails in many ways
        return []


def _tensors(content: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield prefix.rstrip(".") or "tensor", content.detach()
    elif isinstance(content, Mapping) and depth < _MAX_DEPTH:
        for key, value in content.items():
            yield from _tensors(value, f"{prefix}{key}.", depth + 1)


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Every shard that an index names: {name: tensor}."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{index}: a shard index is JSON with a "weight_map" of names to files ({error})') from error
    odd = [name for name in files if Path(name).name != name]
    if odd:
        raise ValueError(f"{index}: shards lie beside their index, got {odd}")
    absent = [name for name in files if not (index.parent / name).is_file()]
    if absent:
        raise ValueError(f"{index}: {len(absent)} of {len(files)} shards are missing: {', '.join(absent)}")
    state: dict[str, Tensor] = {}
    for name in files:
        state.update(read_state_dict(index.parent / name))
    missing = sorted(set(places) - set(state))
    if missing:
        raise ValueError(f"{index}: {len(missing)} tensors of the index are in no shard, {missing[:3]} and so on")
    return state


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
