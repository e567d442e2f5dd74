"""What a method is, and where the methods are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from regista.backbones.base import Backbone

ENTRY_POINT_GROUP = "regista.methods"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class State:
    """What ``fit`` learned.

    Attributes:
        record: Plain values for the history of the model.
        tensors: {name: tensor}.
        notes: What a user should know of this cure.
    """

    record: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """Where a method that works for long keeps what it needs to go on.

    Attributes:
        folder: Its own; made when it is needed.
        resume: Go on with what is there.
    """

    folder: Path
    resume: bool = False


class Method(ABC):
    """One cure.

    Args:
        config: An instance of ``config_class``.

    Attributes:
        name: That of its folder.
        summary: What it does, in one line.
        config_class: A dataclass of its settings.
        needs_images: Whether ``fit`` wants images.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    config_class: ClassVar[type]
    needs_images: bool = True

    def __init__(self, config: Any = None) -> None:
        self.config = self.config_class() if config is None else config

    def unused(self, given: Collection[str]) -> list[str]:
        """Which of the settings that were given have no effect beside the others."""
        return []

    def outline(self, backbone: Backbone) -> Backbone:
        """A backbone of the kind that ``apply`` will give, with other numbers in it: for checks before ``fit``.

        Raises:
            ValueError: for a model that the method cannot treat.
        """
        return backbone

    @abstractmethod
    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Learn what ``apply`` needs; ``backbone`` stays as it is.

        Args:
            images: As ``regista.diagnose`` takes them.
            progress: Called with (what, done, of).
            workspace: For methods that train; a temporary one if None.
        """

    @abstractmethod
    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """A new backbone with its own layout; the given one stays as it is."""

    def merge(self, backbone: Backbone) -> Backbone:
        """The same tokens by plain weights of the model's own library.

        Raises:
            ValueError: if they are not to be had by plain weights.
        """
        if backbone.needs_regista:
            raise ValueError(f"{backbone.name} cannot be plain weights: {backbone.needs_regista}")
        return backbone


def method_names() -> list[str]:
    """All methods: the folders here, and those of other packages."""
    here = Path(__file__).parent
    own = {path.parent.name for path in here.glob("*/method.py")}
    return sorted(own | {point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def method_class(name: str) -> type[Method]:
    """The class of a method; "-" and "_" are the same.

    Raises:
        ValueError: for an unknown name, with the nearest spelling.
    """
    wanted = str(name).replace("-", "_")
    known = method_names()
    if wanted not in known:
        near = get_close_matches(wanted, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown method {name!r}{hint}; known: {', '.join(known)}")
    if (Path(__file__).parent / wanted / "method.py").is_file():
        found: Any = import_module(f"regista.methods.{wanted}.method").METHOD
    else:
        found = next(point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == wanted).load()
    method: type[Method] = found
    return method
