"""The fork guard: an engine works only in the process that created it.

A forked process has a copy of the engine's memory but not its threads, and locks may stay locked
for ever. The guard raises EngineClosed there, so that no call hangs."""

import os
import threading
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from looseleaf.errors import EngineClosed

P = ParamSpec("P")


class Home:
    """The process that created this object."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process created this object."""
        return os.getpid() == self._process

    def require(self) -> None:
        """Raises EngineClosed in a forked process."""
        if not self.is_owner:
            raise EngineClosed(
                "this engine belongs to the process that this one was forked from, and its threads "
                "do not run here: make an engine in each process after the fork, or start "
                "processes by 'spawn'"
            )


class HomeLock:
    """A reentrant lock that raises EngineClosed in a forked process."""

    def __init__(self) -> None:
        self.guard = ForkGuard()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.guard.require()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OfOneProcess:
    """Base of objects that raise TypeError when they are pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to its process and can't be pickled or copied: make "
            "one in each process; documents, parameters and outputs can be sent"
        )


def only_here(function: Callable[P, None]) -> Callable[P, None]:
    """``function``, which does nothing in a forked process."""
    home = Home()

    def guarded(*args: P.args, **named: P.kwargs) -> None:
        if guard.is_owner:
            function(*args, **named)

    return guarded
