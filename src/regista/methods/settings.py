"""Settings of methods: dataclasses filled from keywords or from the command line."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml


def configured(kind: type, values: Mapping[str, Any], *, what: str) -> Any:
    """An instance of a settings dataclass.

    Args:
        values: {setting: value}; whole numbers become floats and lists tuples where these are wanted.

    Raises:
        ValueError: for a setting it does not have, with the nearest spelling, or a value of another type or
            that it refuses.
    """
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    known = [entry.name for entry in fields(kind) if entry.init]
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        near = get_close_matches(unknown, known, n=1)
        hint = f" (did you mean {next(iter(near))!r}?)" if near else ""
        raise ValueError(f"{what} has no setting {unknown!r}{hint}; it has: {', '.join(known) or 'none'}")
    made: Any = kind(**{key: _fitting(hints[key], value, f"{what}: {key}") for key, value in values.items()})
    return made


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Settings from the command line: ["top_k=10", "views=[5,10]"] -> {"top_k": 10, "views": [5, 10]}.

    Raises:
        ValueError: for a value that is not YAML, or a setting given twice.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key in found:
            raise ValueError(f"{key} is given twice")
        try:
            found[key] = _with_numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(f"{setting!r} cannot be read: {error}") from error
    return found


def _with_numbers(value: Any) -> Any:
    """Words that are numbers made so: YAML reads 1e-4 as a word."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def plain_config(config: Any) -> dict[str, Any]:
    """A settings dataclass as plain values."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}


def _fitting(hint: Any, value: Any, what: str) -> Any:
    """The value, made to fit a type hint where nothing is lost."""
    for option in _options(hint):
        matched, made = _matched(option, value)
        if matched:
            return made
    raise ValueError(f"{what} wants {_in_words(hint)}, got {value!r}")


def _matched(option: Any, value: Any) -> tuple[bool, Any]:
    if get_origin(option) is Literal:
        return value in get_args(option), value
    if get_origin(option) is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else None
        inner = next(iter(get_args(option)), Any)
        pairs = [_matched(inner, item) for item in items or []]
        return items is not None and all(ok for ok, _ in pairs), tuple(item for _, item in pairs)
    if option is Any:
        return True, value
    if option is type(None):
        return value is None, None
    if option is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), value
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, option), value


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _in_words(hint: Any) -> str:
    words = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            words += [repr(value) for value in get_args(option)]
        elif option is type(None):
            words.append("None")
        else:
            words.append(
                {"int": "a whole number", "float": "a number", "str": "a word", "bool": "true or false"}.get(
                    getattr(option, "__name__", ""), "a list"
                )
            )
    return " or ".join(words)
