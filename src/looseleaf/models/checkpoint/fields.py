"""Values of a checkpoint's JSON, each of the kind that is asked for or refused by its name.

A default stands for what is not there and for null. Raises CorruptCheckpoint otherwise, and
KeyError with its name for what is not there and has no default.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from looseleaf.errors import CorruptCheckpoint

Json = Mapping[str, Any]

# tensors and positions are counted in what fits 32 bits
_MOST = 2**31 - 1
# squares of it are numbers still
_MOST_REAL = 1e30
_SHOWN = 200


def whole(
    raw: Json, name: str, default: int | None = None, least: int = 1, most: int = _MOST
) -> int:
    """A whole number; 4096.0 is one, too."""
    value = _given(raw, name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(name, f"a whole number from {least} to {most}", value)
    return value


def number(raw: Json, name: str, default: float | None = None, most: float = _MOST_REAL) -> float:
    """A number that is not negative."""
    return as_number(name, _given(raw, name, default), most)


def as_number(name: str, value: object, most: float = _MOST_REAL) -> float:
    """``value`` as such a number; ``name`` says in errors whose it is."""
    # which NaN is not either
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not fits:
        _refuse(name, f"a number from 0 to {most:g}", value)
    return float(value)  # type: ignore[arg-type]


def switch(raw: Json, name: str, default: bool = False) -> bool:
    """True or false."""
    value = _given(raw, name, default)
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


def text(raw: Json, name: str, default: str) -> str:
    """A string."""
    value = _given(raw, name, default)
    if not isinstance(value, str):
        _refuse(name, "a string", value)
    return value


def mapping(raw: Json, name: str) -> Json:
    """An object, empty by default."""
    value = _given(raw, name, {})
    if not isinstance(value, Mapping):
        _refuse(name, "an object", value)
    return value


def rows(raw: Json, name: str) -> list[Any]:
    """A list, empty by default."""
    value = _given(raw, name, [])
    if not isinstance(value, list):
        _refuse(name, "a list", value)
    return value


def shown(value: object) -> str:
    """``value`` for an error message, not too much of it."""
    written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."


def _given(raw: Json, name: str, default: object) -> Any:
    if default is None:
        return raw[name]
    value = raw.get(name)
    return default if value is None else value


def _refuse(name: str, kind: str, value: object) -> NoReturn:
    raise CorruptCheckpoint(f"{name} must be {kind}, not {shown(value)}; correct it")
