"""The templates of pages and what they may call."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def template(name: str) -> jinja2.Template:
    """A template that escapes everything and refuses unknown names."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = code
    return environment.get_template(name)


def code(text: str) -> Markup:
    """Escaped text, with `words between backticks` set as code."""
    parts = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )
