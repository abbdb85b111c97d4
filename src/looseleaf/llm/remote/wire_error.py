"""Errors of the library as messages, for processes that load no model."""

import msgspec

from looseleaf import errors
from looseleaf.errors import EngineFault, LimitExceeded, LooseleafError


class WireError(msgspec.Struct, array_like=True):
    """An error of the library: its class, message and options; ``what`` is of LimitExceeded."""

    kind: str
    message: str
    options: tuple[str, ...] = ()
    what: str = ""


def error_to_wire(error: BaseException) -> WireError:
    """An error as a message; an error of another library becomes an EngineFault."""
    if isinstance(error, LimitExceeded):
        return WireError(type(error).__name__, str(error), what=error.what)
    if isinstance(error, LooseleafError):
        return WireError(type(error).__name__, str(error), tuple(error.options))
    return WireError(EngineFault.__name__, f"{type(error).__name__}: {error}")


def error_from_wire(error: WireError) -> LooseleafError:
    """The error of `error_to_wire`."""
    kind = getattr(errors, error.kind, EngineFault)
    if kind is LimitExceeded:
        return LimitExceeded(error.what, error.message)
    if not (isinstance(kind, type) and issubclass(kind, LooseleafError)):
        kind = EngineFault
    return kind(error.message, *error.options)
