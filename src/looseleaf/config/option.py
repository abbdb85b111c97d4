"""How an option is written: its default with its help text, and the check of its value."""

from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, get_args

from looseleaf.errors import InvalidOption


def require(condition: bool, message: str) -> None:
    """Raise InvalidOption with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InvalidOption(message)


def require_numbers(options: Any) -> None:
    """Raise InvalidOption for a field of a dataclass that is to be a number and is something else;
    a whole number where it is to be whole."""
    for one in fields(options):
        kinds, value = set(get_args(one.type) or (one.type,)), getattr(options, one.name)
        if not kinds & {int, float} or (value is None and type(None) in kinds):
            continue
        whole = float not in kinds
        fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        wanted = "a whole number" if whole else "a number"
        require(fits, f"{one.name} must be {wanted}, not {value!r}")


def option(default: Any, help_text: str) -> Any:
    """A field with its default and the help text that command lines show."""
    return field(default=default, metadata={"help": help_text})
