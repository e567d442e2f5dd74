"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

T = TypeVar("T")
_SETTING = re.compile(r"^[a-z_][a-z_0-9.]*=")


class Device(str, Enum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Dtype(str, Enum):
    """Precision of weights and activations; statistics are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Policy(str, Enum):
    """How images come to a size that the patch size divides."""

    resize = "resize"
    pad = "pad"
    crop = "crop"
    error = "error"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="timm/NAME, timm/NAME@FILE, hf-hub:ORG/NAME, hf/ORG/NAME, open_clip/ARCH/TAG, a local folder, "
        "demo, demo-planted, demo-planted-position, tiny or tiny-planted.",
        show_default=False,
    ),
]
MoreModels = Annotated[
    list[str] | None, typer.Option("-m", "--model", metavar="MODEL", help="Another model beside it; repeat at will.")
]
Images = Annotated[
    list[str] | None,
    typer.Argument(metavar="IMAGES...", help="Files, folders or patterns; key=value settings may stand among them."),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to compute.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Precision of the model.")]
BatchSize = Annotated[int | None, typer.Option("-b", "--batch-size", min=1, help="Images a forward.")]
ImageSize = Annotated[
    tuple[int, int] | None,
    typer.Option("--image-size", metavar="H W", help="Height and width in pixels [default: the model's own]."),
]
PolicyOption = Annotated[Policy | None, typer.Option("--policy", help="How images come to the size.")]
Workers = Annotated[int | None, typer.Option("--workers", min=0, help="Threads that read images.")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="Where to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what a former run wrote there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more.")]
Config = Annotated[Path | None, typer.Option("--config", help="YAML file with settings; flags win over it.")]
AllowPartial = Annotated[bool, typer.Option("--allow-partial", help="Accept a checkpoint that fills only a part.")]


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell images from key=value settings: a word is a setting unless a file has that name."""
    settings = [word for word in arguments if _SETTING.match(word) and not Path(word).exists()]
    return [word for word in arguments if word not in settings], settings


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a YAML file.

    Raises:
        ValueError: if it cannot be read, or is not {setting: value}.
    """
    import yaml

    from regista.results.writing import in_words

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"settings ({path}): {in_words(error)}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"settings ({path}): {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"settings ({path}): wanted lines of key: value, got {type(found).__name__}")
    return found


def resolve(schema: type[T], config: Path | None, settings: Sequence[str], flags: Mapping[str, Any]) -> T:
    """Merge defaults < YAML file < key=value < flags that were given into one typed config.

    Raises:
        ValueError: for an unknown key or a value of the wrong type, naming the key and what
            there is.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from regista.results.writing import in_words

    given = {
        key: value.value if isinstance(value, Enum) else value for key, value in flags.items() if value is not None
    }
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    layers: list[Any] = [OmegaConf.structured(schema)]
    try:
        if config is not None:
            layers.append(OmegaConf.load(config))
        layers += [OmegaConf.from_dotlist(list(settings)), OmegaConf.create(given)]
        merged: T = OmegaConf.to_object(OmegaConf.merge(*layers))  # type: ignore[assignment]
    except OSError as error:
        raise ValueError(f"settings ({config}): {in_words(error)}") from error
    except (OmegaConfBaseException, YAMLError, TypeError, UnicodeDecodeError) as error:
        known = ", ".join(field.name for field in fields(schema))  # type: ignore[arg-type]
        where = f"settings ({config})" if config is not None else "settings"
        hint = "; a size is written image_size=[84,70]" if "image_size" in str(error) else ""
        raise ValueError(f"{where}: {str(error).splitlines().pop(0)}{hint}; known keys: {known}") from error
    return merged


def load_model(spec: str, *, device: str, dtype: str, image_size: Any = None, allow_partial: bool = False) -> Backbone:
    """``regista.load`` with the command's options."""
    from regista.backbones.loading import load

    return load(spec, image_size=image_size, device=device, dtype=dtype, allow_partial=allow_partial)


def new_folder(kind: str, root: Path = Path("runs")) -> Path:
    """The next free numbered folder, e.g. runs/diagnose-003."""
    taken = [int(match[1]) for path in root.glob(f"{kind}-*") if (match := re.fullmatch(rf"{kind}-(\d+)", path.name))]
    return root / f"{kind}-{max(taken, default=0) + 1:03d}"


def run_folder(command: str, kind: str, out: Path | None, *, force: bool, voice: Voice, resume: bool = False) -> Path:
    """Where a command writes, refused before anything is loaded if it cannot be.

    Args:
        command: A folder of its own, runs/COMMAND-001 and so on, is taken if ``out`` is None.
        kind: Of the run.

    Raises:
        ValueError: as ``RunFolder.check``, and for --resume without a folder.
    """
    from regista.results import RunFolder

    if resume and out is None:
        raise ValueError("--resume needs the folder of the run: -o FOLDER")
    folder = out or new_folder(command)
    if RunFolder.check(folder, kind, force=force, resume=resume) is None and resume:
        voice.note(f"no run in {folder} yet; this begins one")
    return folder


def find_photos(files: Sequence[str], voice: Voice) -> list[Path]:
    """The image files that are named, each once, however often it is named."""
    from regista.data.images import find_images, unique_files

    found = find_images(files) if files else []
    once = unique_files(found)
    if len(once) < len(found):
        voice.note(f"{len(found) - len(once)} of {len(found)} files were named twice; each counts once")
    return once


@dataclass(frozen=True)
class Voice:
    """How much a command says on stderr."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False

    def note(self, text: str) -> None:
        """For every run that is not quiet."""
        if text and not self.quiet:
            typer.echo(text, err=True)

    def detail(self, text: str) -> None:
        """For --verbose."""
        if self.verbose:
            typer.echo(text, err=True)
