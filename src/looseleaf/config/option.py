"""How an option is written: its default with its help text, and the check of its value."""

import math
from collections.abc import Sequence
from dataclasses import field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from looseleaf.errors import InvalidOption


def require(condition: bool, message: str) -> None:
    """Raise InvalidOption with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InvalidOption(message)


def require_kinds(options: Any) -> None:
    """Raise InvalidOption for a field of a dataclass that is to be a number, text, a switch, one of
    some words, or a tuple of these, and is something else. Numbers are finite, and whole where they
    are to be. A list becomes a tuple."""
    for one in fields(options):
        value = getattr(options, one.name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(options, one.name, value)
        if get_origin(one.type) is Literal:
            *words, last = get_args(one.type)
            told = f"unknown {one.name} {value!r}: use {', '.join(words)} or {last}"
            require(value in (*words, last), told)
        union = get_origin(one.type) in (Union, UnionType)
        _require_kind(one.name, get_args(one.type) if union else (one.type,), value)


def _require_kind(name: str, kinds: Sequence[Any], value: object) -> None:
    """``value`` is of one of ``kinds``, of which others than those above are not looked at."""
    if value is None and type(None) in kinds:
        return
    rows = [kind for kind in kinds if get_origin(kind) is tuple]
    if rows and isinstance(value, tuple):
        for item in value:
            _require_kind(f"each of {name}", get_args(rows[0])[:1], item)
    elif bool in kinds:
        require(isinstance(value, bool), f"{name} must be True or False, not {value!r}")
    elif int in kinds or float in kinds:
        _require_number(name, value, whole=float not in kinds)
    elif str in kinds:
        require_text(name, value)
    elif rows:
        require(any(get_origin(kind) is Literal for kind in kinds), f"{name} must be a tuple")


def _require_number(name: str, value: object, *, whole: bool) -> None:
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    require(fits, f"{name} must be {'a whole number' if whole else 'a number'}, not {value!r}")
    require(math.isfinite(cast(float, value)), f"{name} must be a finite number, not {value!r}")


def require_text(name: str, value: object) -> None:
    """Raise InvalidOption unless ``value`` is text that can be written down."""
    require(isinstance(value, str), f"{name} must be a string, not {value!r}")
    whole = not any("\ud800" <= letter <= "\udfff" for letter in cast(str, value))
    require(whole, f"{name} has half of a surrogate pair: leave it out")


def option(default: Any, help_text: str) -> Any:
    """A field with its default and the help text that command lines show."""
    return field(default=default, metadata={"help": help_text})
