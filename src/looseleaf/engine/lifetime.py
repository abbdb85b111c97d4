"""The lifetime of an engine: it belongs to one process, and its end closes all beside it.

A forked process has a copy of the engine's memory without its threads. Locks that a thread held at
the fork are never released. So calls raise EngineClosed there.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, ParamSpec

import torch

from looseleaf.engine.documents.hosting import Indexing
from looseleaf.engine.kv_events import KvEvents
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.tiering.tiering import Tiering
from looseleaf.errors import EngineClosed
from looseleaf.sandbox import Sandbox

P = ParamSpec("P")


class ForkGuard:
    """Remembers its owner, the process that created it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_owner(self) -> bool:
        """Whether this process is the owner, not a fork of it."""
        return os.getpid() == self._process

    def require(self) -> None:
        """Raises EngineClosed in a forked process."""
        if not self.is_owner:
            raise EngineClosed(
                "this engine belongs to the process that this one was forked from, and its threads "
                "do not run here: make an engine in each process after the fork, or start "
                "processes by 'spawn'"
            )


class ForkGuardLock:
    """A reentrant lock that raises EngineClosed in a forked process."""

    def __init__(self) -> None:
        self.guard = ForkGuard()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.guard.require()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ProcessBound:
    """A base class of objects that raise TypeError when pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to its process and can't be pickled or copied: make "
            "one in each process; documents, parameters and outputs can be sent"
        )


def only_here(function: Callable[P, None]) -> Callable[P, None]:
    """``function`` with no effect in forked processes."""
    guard = ForkGuard()

    def guarded(*args: P.args, **named: P.kwargs) -> None:
        if guard.is_owner:
            function(*args, **named)

    return guarded


def close(
    indexing: Indexing,
    tiering: Tiering,
    runner: Runner,
    sandboxes: Sequence[Sandbox],
    events: KvEvents | None = None,
) -> None:
    """Close everything that runs beside an engine, and free its GPU pages if it has no tiers.

    The arguments hold no reference to the engine, which could otherwise never be collected."""
    ranks = tiering.ranks
    if ranks is not None:
        # the others write to their tiers meanwhile
        ranks.dismiss()
    for sandbox in sandboxes:
        sandbox.close()
    indexing.close()
    tiering.close()
    if events is not None:
        events.publisher.close()
    device = runner.pool.kv.device
    if device.type == "cuda":
        # a step in flight still reads host memory that is about to be reused; the engine has
        # reported errors of the device already
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            # a thread of a slow tier may still write to the pages
            if tiering.tiers is None:
                runner.pool.release_memory()
    if ranks is not None:
        # NCCL ends only after all graphs with its operations
        for graphs in runner.captures:
            graphs.clear()
        ranks.close()
