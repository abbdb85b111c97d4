"""The process that an engine belongs to.

One that is forked from it has a copy of the engine's memory, but none of its threads, and locks
that were held then are held for ever. So there an engine is refused in words, and ends at once.
"""

import os
import threading
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from looseleaf.errors import EngineClosed

P = ParamSpec("P")


class Home:
    """The process in which this object was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether that is this process, and not one that this was forked from."""
        return os.getpid() == self._process

    def require(self) -> None:
        """Raise EngineClosed in any other process."""
        if not self.is_here:
            raise EngineClosed(
                "this engine belongs to the process that this one was forked from, and its threads "
                "do not run here: make an engine in each process after the fork, or start "
                "processes by 'spawn'"
            )


class HomeLock:
    """A lock that its holder may take again; in another process taking it raises EngineClosed."""

    def __init__(self) -> None:
        self.home = Home()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.home.require()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OfOneProcess:
    """What another process can't be sent; raises TypeError where it is pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to its process and can't be pickled or copied: make "
            "one in each process; documents, parameters and outputs can be sent"
        )


def only_here(function: Callable[P, None]) -> Callable[P, None]:
    """``function``, which does nothing in a process that is forked from this one."""
    home = Home()

    def called(*args: P.args, **named: P.kwargs) -> None:
        if home.is_here:
            function(*args, **named)

    return called
