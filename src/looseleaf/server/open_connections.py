"""How many connections a server holds: fewer than the process has descriptors for.

A process without a descriptor left can accept nothing, and asyncio's loop then does little else
than trying to. So somebody gives way before: who has been longest without a request under way."""

import logging
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

_log = logging.getLogger(__name__)

# what macOS lets a process have whose hard limit is said to be infinite
_OPEN_MAX = 10_240
_RESERVE = 128
"""Descriptors for all that is no connection: files, tiers, the log."""

_BACKLOG = 512
"""Most connections that are accepted in one turn of the loop."""


@runtime_checkable
class Closable(Protocol):
    """A connection that can be asked to give way."""

    def give_way(self) -> None:
        """Close at once."""
        ...


class OpenConnections:
    """The ``num`` connections of one server, ``most`` at a time. ``on_refused`` hears of each that
    gives way."""

    def __init__(self, most: int, on_refused: Callable[[], None] = lambda: None) -> None:
        self.most = most
        self.num = 0
        self._on_refused = on_refused
        # those without a request under way, by how long that is so
        self._idle: OrderedDict[Closable, None] = OrderedDict()

    def enter(self, connection: Closable) -> None:
        """Count a new connection. If there are too many the oldest idle one is closed, which may be
        this."""
        self.num += 1
        self._idle[connection] = None
        if self.num > self.most:
            oldest, _ = self._idle.popitem(last=False)
            oldest.give_way()
            self._on_refused()
            _log.warning(
                "%d connections are open, the most that are taken: idle ones give way to new ones",
                self.most,
            )

    def busy(self, connection: Closable) -> None:
        """A request of its is under way: it does not give way."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Its request has been answered."""
        self._idle[connection] = None

    def leave(self, connection: Closable) -> None:
        """It has been closed."""
        self.num -= 1
        self._idle.pop(connection, None)


def raise_descriptor_limit() -> None:
    """Let the process have as many descriptors as it may give itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    refusal: Exception | None = None
    for wanted in (hard, _OPEN_MAX):
        if wanted == _OPEN_MAX and soft >= wanted:
            continue
        try:
            return resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            refusal = refusal or error
    _log.warning("the limit of descriptors stays at %d: %s", soft, refusal)


def room(wanted: int) -> tuple[int, int]:
    """Most connections, no more than ``wanted``, and most that may be accepted in one turn, for the
    descriptors that the process has."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted, _BACKLOG
    # one that gives way holds its descriptor until the next turn
    backlog = max(1, min(_BACKLOG, limit // 8))
    return max(1, min(wanted, limit - backlog - min(_RESERVE, limit // 4))), backlog
