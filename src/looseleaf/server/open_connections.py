"""Bounds the open connections below the process's limit of file descriptors.

Without free descriptors asyncio's loop retries accept and starves requests. Above the bound a
server closes the connection that has been idle longest."""

import logging
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

_log = logging.getLogger(__name__)

# macOS's limit for processes whose hard limit is infinite
_OPEN_MAX = 10_240
_RESERVE = 128
"""Descriptors for files, tiers and the log."""

_BACKLOG = 512
"""Most connections that one iteration of the loop accepts."""


@runtime_checkable
class Closable(Protocol):
    """A connection that the server may close while it is idle."""

    def close_idle(self) -> None:
        """Close immediately."""
        ...


class OpenConnections:
    """The ``num`` connections of one server, at most ``capacity``.

    It calls ``on_refused`` for every connection that it closes."""

    def __init__(self, capacity: int, on_refused: Callable[[], None] = lambda: None) -> None:
        self.capacity = capacity
        self.num = 0
        self._on_refused = on_refused
        # longest idle first
        self._idle: OrderedDict[Closable, None] = OrderedDict()

    def enter(self, connection: Closable) -> None:
        """Count a new connection; above the capacity, close the longest idle one, maybe this."""
        self.num += 1
        self._idle[connection] = None
        if self.num > self.capacity:
            oldest, _ = self._idle.popitem(last=False)
            oldest.close_idle()
            self._on_refused()
            _log.warning(
                "%d connections are open, the limit: new connections replace idle ones",
                self.capacity,
            )

    def busy(self, connection: Closable) -> None:
        """Mark a connection as answering a request."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Mark a connection as idle."""
        self._idle[connection] = None

    def leave(self, connection: Closable) -> None:
        """Remove a closed connection."""
        self.num -= 1
        self._idle.pop(connection, None)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    refusal: Exception | None = None
    for limit in (hard, _OPEN_MAX):
        if limit == _OPEN_MAX and soft >= limit:
            continue
        try:
            return resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError) as error:
            refusal = refusal or error
    _log.warning("the limit of descriptors stays at %d: %s", soft, refusal)


def connection_capacity(max_connections: int) -> tuple[int, int]:
    """The most open connections, and the accept backlog, within the limit of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections, _BACKLOG
    # a closed connection keeps its descriptor until the loop's next iteration
    backlog = max(1, min(_BACKLOG, limit // 8))
    return max(1, min(max_connections, limit - backlog - min(_RESERVE, limit // 4))), backlog
