"""Typed access to the fields of a checkpoint's JSON.

A missing field and null give the default. A missing field without a default raises KeyError with
its name. A value of another type raises CorruptCheckpoint.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from looseleaf.errors import CorruptCheckpoint

Json = Mapping[str, Any]

# counts of tensors and positions fit 32 bits
_MAX_INTEGER = 2**31 - 1
# its square is finite
_MAX_REAL = 1e30
_MAX_SHOWN = 200


def whole(
    raw: Json, name: str, default: int | None = None, least: int = 1, most: int = _MAX_INTEGER
) -> int:
    """An integer from ``least`` to ``most``; 4096.0 counts as 4096."""
    value = _value_or_default(raw, name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(name, f"a whole number from {least} to {most}", value)
    return value


def number(raw: Json, name: str, default: float | None = None, most: float = _MAX_REAL) -> float:
    """A number from 0 to ``most``."""
    return as_number(name, _value_or_default(raw, name, default), most)


def as_number(name: str, value: object, most: float = _MAX_REAL) -> float:
    """``value`` as a number from 0 to ``most``; errors name ``name``."""
    # NaN fails the comparison
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not fits:
        _refuse(name, f"a number from 0 to {most:g}", value)
    return float(value)  # type: ignore[arg-type]


def switch(raw: Json, name: str, default: bool = False) -> bool:
    """True or false."""
    value = _value_or_default(raw, name, default)
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


def text(raw: Json, name: str, default: str) -> str:
    """A string."""
    value = _value_or_default(raw, name, default)
    if not isinstance(value, str):
        _refuse(name, "a string", value)
    return value


def mapping(raw: Json, name: str) -> Json:
    """An object, empty by default."""
    value = _value_or_default(raw, name, {})
    if not isinstance(value, Mapping):
        _refuse(name, "an object", value)
    return value


def rows(raw: Json, name: str) -> list[Any]:
    """A list, empty by default."""
    value = _value_or_default(raw, name, [])
    if not isinstance(value, list):
        _refuse(name, "a list", value)
    return value


def shown(value: object) -> str:
    """The repr of ``value`` for an error message, shortened."""
    written = repr(value)
    return written if len(written) <= _MAX_SHOWN else f"{written[:_MAX_SHOWN]}..."


def _value_or_default(raw: Json, name: str, default: object) -> Any:
    if default is None:
        return raw[name]
    value = raw.get(name)
    return default if value is None else value


def _refuse(name: str, kind: str, value: object) -> NoReturn:
    raise CorruptCheckpoint(f"{name} must be {kind}, not {shown(value)}; correct it")
