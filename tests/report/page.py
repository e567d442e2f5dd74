"""Looks into a page as a browser would: elements, what they load, and the text one sees."""

from __future__ import annotations

import re
from html.parser import HTMLParser

LOADS = ("src", "href", "srcset", "poster", "data", "action", "background", "xlink:href", "content")
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Attributes: tags [(name, attributes)], text, styles, open_tags (left open at the end)."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.styles: list[str] = []
        self.open_tags: list[str] = []
        self.wrong: list[str] = []
        self._text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open_tags or self.open_tags.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        (self.styles if self.open_tags and self.open_tags[-1] == "style" else self._text).append(data)

    @property
    def text(self) -> str:
        """Everything a reader sees, with single spaces."""
        return " ".join(" ".join(self._text).split())

    @property
    def parts(self) -> list[str]:
        """The pieces of text between tags."""
        return self._text

    @property
    def loads(self) -> list[str]:
        """Every address that an element or a style names, but for places in the page and embedded data."""
        found = [value for _, attrs in self.tags for name, value in attrs.items() if name in LOADS]
        styles = [*self.styles, *(attrs.get("style", "") for _, attrs in self.tags)]
        found += [
            address for style in styles for address in re.findall(r"url\(\s*['\"]?([^)'\"]*)|@import\s+(\S+)", style)
        ]
        found = ["".join(address) if isinstance(address, tuple) else address for address in found]
        return [address for address in found if re.search(r"^\s*(\w+:)?//|^\s*(https?|ftp|file|javascript):", address)]

    def all(self, tag: str) -> list[dict[str, str]]:
        """Attributes of every element of a kind."""
        return [attrs for name, attrs in self.tags if name == tag]
