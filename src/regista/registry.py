"""Things found by name, imported only when asked for; other packages join by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class Registry:
    """Names and where they are defined.

    Another package adds names in its own pyproject::

        [project.entry-points."regista.backbones"]
        my_vit = "my_package.vit:load"

    A name that is taken stays with its owner: asking for it is an error that names both, so
    that no installed package changes what a built-in name means.

    Args:
        kind: What is registered, in the singular, for messages and for the entry point group.
        entries: {name: "module:attribute"} of what is built in.
        entry_point_group: Of third parties; ``regista.<kind>`` by default.

    Raises:
        ValueError: for an entry that is not "module:attribute".
    """

    def __init__(self, kind: str, entries: Mapping[str, str], entry_point_group: str | None = None) -> None:
        for name, target in entries.items():
            if len(target.split(":")) != 2 or not all(target.split(":")):
                raise ValueError(f"{kind} {name!r} is given as 'module:attribute', got {target!r}")
        self.kind = kind
        self.entry_point_group = entry_point_group or f"regista.{kind}"
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """All names, sorted, those of third parties too."""
        return sorted({*self._entries, *self._third_parties})

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._third_parties

    def get(self, name: str) -> Any:
        """Import what is registered under a name.

        Raises:
            ValueError: for an unknown name (lists the known ones and the nearest spelling), a
                name that two packages claim, or one whose module cannot be imported.
        """
        claims = self._claims(name)
        if not claims:
            near = get_close_matches(name, self.names(), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown {self.kind} {name!r}{hint}; known: {', '.join(self.names()) or 'none'}")
        if len(claims) > 1:
            owners = " and ".join(f"{target} ({owner})" for target, owner in claims.items())
            raise ValueError(f"{self.kind} {name!r} is claimed by {owners}; uninstall one or have it renamed")
        target, owner = next(iter(claims.items()))
        module, _, attribute = target.partition(":")
        try:
            value: Any = import_module(module)
            for part in filter(None, attribute.split(".")):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.kind} {name!r} ({target}, {owner}) cannot be imported: {error}") from error
        return value

    @cached_property
    def _third_parties(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.entry_point_group):
            found.setdefault(point.name, []).append(point)
        return found

    def _claims(self, name: str) -> dict[str, str]:
        """{target: owner} of everything that goes by a name; one target said twice is one claim."""
        claims = {self._entries[name]: "built in"} if name in self._entries else {}
        for point in self._third_parties.get(name, []):
            owner = f"package {point.dist.name}" if point.dist is not None else "another package"
            claims.setdefault(point.value.split("[")[0].replace(" ", ""), owner)
        return claims
