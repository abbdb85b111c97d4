"""The errors of Looseleaf, one small tree. Every message says what to do.

LooseleafError
├── InvalidRequest      this request can't be served as asked; others go on
│   ├── PromptTooLong       more tokens than the context holds
│   ├── EmptyDocument       a document without tokens
│   ├── PoolTooSmall        more pages than the device pool has
│   ├── DocumentNotFound    no registered document of that id
│   ├── DocumentExists      another text is registered under that id
│   ├── TooManyDocuments    as many are registered as one salt may have
│   └── LimitExceeded       its template, tokenizer or grammar takes too much time or memory
├── DeadlineExceeded    a request took longer than it was allowed to
├── EngineFault         a request ended by a fault inside the engine; others go on
├── EngineClosed        the engine takes no new requests
├── InvalidOption       a configuration value is unknown or out of range
├── ModelError          a checkpoint can't be used
│   ├── CheckpointNotFound  no such folder or hub id
│   ├── CorruptCheckpoint   files missing, truncated or inconsistent
│   └── UnsupportedModel    a family or feature Looseleaf does not implement
├── MissingPackage      a command or option needs a package that is not installed
├── NativeUnavailable   the C kernels can't be compiled here
├── CalibrationFailed   what attention costs could not be measured
└── IntegrityError      the pool's books do not balance: a bug in Looseleaf
"""

import re
from collections.abc import Callable


class LooseleafError(Exception):
    """Root of all errors that Looseleaf raises on purpose.

    ``options`` are the keywords that the message names. Callers of the library read it as it is;
    command line and server name the options as their own callers write them, by `named`."""

    def __init__(self, message: str = "", *options: str) -> None:
        super().__init__(message)
        self.options = options

    def named(self, name: Callable[[str], str]) -> str:
        """The message, with ``name(option)`` in place of each option."""
        if not self.options:
            return str(self)
        # a longer name first: one may begin another; a quoted word is a value
        words = "|".join(sorted(map(re.escape, self.options), key=len, reverse=True))
        pattern = rf"(?<![\w'\"-])(?:{words})(?![\w'\"-])"
        return re.sub(pattern, lambda match: name(match[0]), str(self))


class InvalidRequest(LooseleafError, ValueError):
    """This request can't be served as asked; the engine goes on with the others."""


class PromptTooLong(InvalidRequest):
    """The prompt, its documents and the tokens asked for do not fit the context."""


class EmptyDocument(InvalidRequest):
    """A document without any token."""


class PoolTooSmall(InvalidRequest):
    """The request needs more pages than the device pool will ever have."""


class DocumentNotFound(InvalidRequest):
    """No document of that id is registered, at least not under this salt."""


class DocumentExists(InvalidRequest):
    """Another text is registered under that id."""


class TooManyDocuments(InvalidRequest):
    """As many documents are registered under this salt as it may have."""


class LimitExceeded(InvalidRequest):
    """A template, a tokenizer or a grammar took more time, memory or output than it may.

    ``what`` is ``template``, ``tokenizer`` or ``grammar``."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.what, str(self))


class DeadlineExceeded(LooseleafError, TimeoutError):
    """A request took longer than it was allowed to, and was ended."""


class EngineFault(LooseleafError):
    """A fault inside the engine ended this request; ``__cause__`` is what happened."""


class EngineClosed(LooseleafError):
    """The engine takes no new requests: it was closed, or finishes what it has and closes then."""


class InvalidOption(LooseleafError, ValueError):
    """A configuration value is unknown or out of range."""


class ModelError(LooseleafError):
    """A checkpoint can't be used."""


class CheckpointNotFound(ModelError, FileNotFoundError):
    """No such folder, and no such id on the hub."""


class CorruptCheckpoint(ModelError):
    """Files of the checkpoint are missing, truncated or do not fit together."""


class UnsupportedModel(ModelError):
    """A model family or a feature of one that Looseleaf does not implement."""


class MissingPackage(LooseleafError, ImportError):
    """A command or an option needs a package that is not installed."""


class NativeUnavailable(LooseleafError):
    """The C kernels of the CPU path can't be compiled on this machine."""


class CalibrationFailed(LooseleafError):
    """What attention costs could not be measured: the device was disturbed, or too busy."""


class IntegrityError(LooseleafError):
    """The page pool's books do not balance: a bug in Looseleaf, please report it."""


def install(*extras: str) -> str:
    """The sentence that says how to install ``extras`` of pyproject.toml."""
    return f"run pip install '.[{','.join(extras)}]' in a checkout of Looseleaf"


def as_looseleaf_error(error: Exception) -> LooseleafError:
    """``error`` itself if it is one of ours, else an EngineFault that it caused."""
    if isinstance(error, LooseleafError):
        return error
    fault = EngineFault(
        f"a fault inside the engine ended this request ({type(error).__name__}: {error}): "
        "send it again, and report it if it happens twice"
    )
    fault.__cause__ = error
    return fault
