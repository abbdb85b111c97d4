"""Options of the configuration: fields with a help text, and the validation of their values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from looseleaf.errors import InvalidOption

_MOST_SHOWN = 80
# larger floats do not represent every whole number
_MOST_WHOLE = 2**53


def require(condition: bool, message: str, *options: str) -> None:
    """Raise InvalidOption with ``message``, which names ``options``, unless ``condition`` holds."""
    if not condition:
        raise InvalidOption(message, *options)


def require_each(options: Any, rule: str, check: Callable[[Any], bool], *names: str) -> None:
    """Raise InvalidOption for a field of ``names`` that is not None and fails ``check``.

    The message is "NAME must be ``rule``, not VALUE"."""
    for name in names:
        value = getattr(options, name)
        fits = value is None or check(value)
        require(fits, f"{name} must be {rule}, not {shown(value)}", name)


def require_positive(options: Any, *names: str) -> None:
    """Raise InvalidOption for a number in ``names`` that is 0 or less."""
    require_each(options, "positive", lambda value: value > 0, *names)


def require_not_negative(options: Any, *names: str) -> None:
    """Raise InvalidOption for a negative number in ``names``."""
    require_each(options, "0 or more", lambda value: value >= 0, *names)


def require_share(options: Any, *names: str, zero: bool = False) -> None:
    """Raise InvalidOption for a number in ``names`` outside of (0, 1], or [0, 1] with ``zero``."""
    rule = "from 0 to 1" if zero else "above 0 and at most 1"
    require_each(options, rule, lambda v: 0 < v <= 1 or (zero and v == 0), *names)


def shown(value: object) -> str:
    """``value`` for a message: its repr, truncated, and whole numbers without a fraction."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _MOST_WHOLE
    try:
        text = repr(int(cast(float, value))) if whole else repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def require_kinds(options: Any) -> None:
    """Raise InvalidOption for a field of a dataclass whose value does not have its annotated type.

    Checks numbers (which must be finite), strings, bools, literals, and tuples of these. Converts
    lists to tuples."""
    for annotated in fields(options):
        name, kind, value = annotated.name, annotated.type, getattr(options, annotated.name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(options, name, value)
        union = get_origin(kind) in (Union, UnionType)
        kinds = get_args(kind) if union else (kind,)
        present = [arm for arm in kinds if arm is not type(None)]
        is_absent = value is None and len(present) < len(kinds)
        if len(present) == 1 and get_origin(present[0]) is Literal and not is_absent:
            *words, last = get_args(present[0])
            message = f"unknown {name} {shown(value)}: use {', '.join(words)} or {last}"
            require(value in (*words, last), message, name)
        _require_kind(name, kinds, value)


def _require_kind(name: str, kinds: Sequence[Any], value: object, each: str = "") -> None:
    if value is None and type(None) in kinds:
        return
    tuples = [kind for kind in kinds if get_origin(kind) is tuple]
    if tuples and isinstance(value, tuple):
        for item in value:
            _require_kind(name, get_args(tuples[0])[:1], item, "each of ")
    elif bool in kinds:
        fits = isinstance(value, bool)
        require(fits, f"{each}{name} must be True or False, not {shown(value)}", name)
    elif int in kinds or float in kinds:
        _require_number(name, value, each, whole=float not in kinds)
    elif str in kinds:
        require_text(name, value, each)
    elif tuples:
        fits = any(get_origin(kind) is Literal for kind in kinds)
        require(fits, f"{name} must be a tuple, not {shown(value)}", name)


def _require_number(name: str, value: object, each: str, *, whole: bool) -> None:
    fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    kind = "a whole number" if whole else "a number"
    require(fits, f"{each}{name} must be {kind}, not {shown(value)}", name)
    # isfinite raises for integers beyond the range of floats
    finite = isinstance(value, Integral) or math.isfinite(cast(float, value))
    require(finite, f"{each}{name} must be a finite number, not {shown(value)}", name)


def require_text(name: str, value: object, each: str = "") -> None:
    """Raise InvalidOption unless ``value`` is a string that UTF-8 can encode."""
    require(isinstance(value, str), f"{each}{name} must be a string, not {shown(value)}", name)
    encodable = not any("\ud800" <= letter <= "\udfff" for letter in cast(str, value))
    require(encodable, f"{each}{name} has half of a surrogate pair: leave it out", name)


def option(default: Any, help_text: str) -> Any:
    """A dataclass field with its default and its help text for command lines."""
    return field(default=default, metadata={"help": help_text})
