"""The tree of errors. Every message says what to do.

LooseleafError
├── InvalidRequest      a request is invalid; others continue
│   ├── PromptTooLong       more tokens than the context holds
│   ├── EmptyDocument       a document without tokens
│   ├── PoolTooSmall        more pages than the device pool has
│   ├── DocumentNotFound    no registered document with that id
│   ├── DocumentExists      another text is registered under that id
│   ├── TooManyDocuments    the limit of registered documents is reached
│   └── LimitExceeded       its template, tokenizer or grammar takes too much time or memory
├── DeadlineExceeded    a request exceeded its time limit
├── EngineFault         a fault inside the engine ended a request; others continue
│   └── EngineLost          the engine's process ended; it may start again
├── EngineClosed        the engine accepts no new requests
├── InvalidOption       a configuration value is unknown or out of range
├── ModelError          a checkpoint can't be used
│   ├── CheckpointNotFound  no such folder or hub id
│   ├── CorruptCheckpoint   files missing, truncated or inconsistent
│   └── UnsupportedModel    a family or feature Looseleaf does not implement
├── MissingPackage      a command or option needs a package that is not installed
├── NativeUnavailable   the C kernels can't be compiled here
├── CalibrationFailed   attention costs can't be measured
└── IntegrityError      the page pool is inconsistent: a bug in Looseleaf
"""

import re
from collections.abc import Callable


class LooseleafError(Exception):
    """Root of all errors of Looseleaf.

    ``options`` are the library keywords in the message. Command line and server replace them by
    flags or fields with `named`."""

    def __init__(self, message: str = "", *options: str) -> None:
        super().__init__(message)
        self.options = options

    def named(self, name: Callable[[str], str]) -> str:
        """The message, with each option replaced by ``name(option)``."""
        if not self.options:
            return str(self)
        # longest first, because a name may be the prefix of another; quoted words are values
        words = "|".join(sorted(map(re.escape, self.options), key=len, reverse=True))
        pattern = rf"(?<![\w'\"-])(?:{words})(?![\w'\"-])"
        return re.sub(pattern, lambda match: name(match[0]), str(self))


class InvalidRequest(LooseleafError, ValueError):
    """A request is invalid; the engine continues with the others."""


class PromptTooLong(InvalidRequest):
    """Prompt, documents and ``max_tokens`` exceed the model's context."""


class EmptyDocument(InvalidRequest):
    """A document without tokens."""


class PoolTooSmall(InvalidRequest):
    """A request needs more pages than the device pool has."""


class DocumentNotFound(InvalidRequest):
    """No document with that id is registered under this salt."""


class DocumentExists(InvalidRequest):
    """Another text is registered under that id."""


class TooManyDocuments(InvalidRequest):
    """The limit of registered documents of this salt is reached."""


class LimitExceeded(InvalidRequest):
    """A template, a tokenizer or a grammar took more time, memory or output than it may.

    ``what`` is ``template``, ``tokenizer`` or ``grammar``."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.what, str(self))


class DeadlineExceeded(LooseleafError, TimeoutError):
    """A request exceeded its time limit and was ended."""


class EngineFault(LooseleafError):
    """A fault inside the engine ended this request; ``__cause__`` is the original error."""


class EngineLost(EngineFault):
    """The engine's process ended, with all requests in it. It may start again."""


class EngineClosed(LooseleafError):
    """The engine accepts no new requests: it is closed, or finishes its requests and closes."""


class InvalidOption(LooseleafError, ValueError):
    """A configuration value is unknown or out of range."""


class ModelError(LooseleafError):
    """A checkpoint can't be used."""


class CheckpointNotFound(ModelError, FileNotFoundError):
    """No such folder, and no such id on the hub."""


class CorruptCheckpoint(ModelError):
    """Files of the checkpoint are missing, truncated or inconsistent."""


class UnsupportedModel(ModelError):
    """A model family or feature that Looseleaf does not implement."""


class MissingPackage(LooseleafError, ImportError):
    """A command or an option needs a package that is not installed."""


class NativeUnavailable(LooseleafError):
    """The C kernels of a CPU can't be compiled on this machine."""


class CalibrationFailed(LooseleafError):
    """The costs of attention can't be measured, because the device is disturbed or busy."""


class IntegrityError(LooseleafError):
    """The accounting of the page pool is inconsistent: a bug in Looseleaf, please report it."""


def install(*extras: str) -> str:
    """The advice to install ``extras`` of pyproject.toml, for messages."""
    return f"run pip install '.[{','.join(extras)}]' in a checkout of Looseleaf"


def as_looseleaf_error(error: Exception) -> LooseleafError:
    """``error`` itself if it is a LooseleafError, else an EngineFault with it as cause."""
    if isinstance(error, LooseleafError):
        return error
    fault = EngineFault(
        f"a fault inside the engine ended this request ({type(error).__name__}: {error}): "
        "send it again, and report it if it happens twice"
    )
    fault.__cause__ = error
    return fault
