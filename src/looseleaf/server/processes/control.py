"""Messages between the parent and its processes, and the socket that carries them.

The socket also carries sockets: the parent connects an API process with the engine by sending one
end of a socket pair to each. So the processes share no name in the file system."""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from looseleaf.llm.remote.link import Link, frame_of, read_frame
from looseleaf.llm.remote.wire_error import WireError

_MAX_SOCKETS = 4

StoreMethod = Literal["put", "get", "chain", "delete"]


class Setup(msgspec.Struct, tag="setup"):
    """The first message to a process: the model and its options.

    An API process also gets its ``slot``, the ``port``, the number of API processes, and the
    descriptor of the table that they count in."""

    model: str | None
    server: dict[str, Any]
    engine: dict[str, Any]
    slot: int = 0
    port: int = 0
    num_processes: int = 1
    counts: int = -1


class Connect(msgspec.Struct, tag="connect"):
    """Use the socket that comes along; an API process also gets the facts of the engine."""

    facts: dict[str, Any] | None = None


class Drain(msgspec.Struct, tag="drain"):
    """To an API process: finish running requests, and end. ``force`` skips running requests."""

    force: bool = False


class Close(msgspec.Struct, tag="close"):
    """To the engine's process: end, after at most ``patience`` seconds."""

    patience: float


class GiveUp(msgspec.Struct, tag="give_up"):
    """To an API process: the engine does not start again."""

    reason: str


class Restored(msgspec.Struct, tag="restored"):
    """The registered documents of an earlier engine are registered again. The first API process
    sends it, and the parent passes it to the others."""


class Lost(msgspec.Struct, tag="lost"):
    """From an API process: its connection with the engine has ended."""


class Scrape(msgspec.Struct, tag="scrape"):
    """A request for metrics: of all processes to the parent, or of one process to it."""

    number: int


class Samples(msgspec.Struct, tag="samples"):
    """The metrics of one process; None as text of all processes for an API process."""

    number: int
    families: Any = None
    text: bytes = b""


class Store(msgspec.Struct, tag="store"):
    """A call of the table of stored responses: a method's name, and its arguments."""

    number: int
    method: StoreMethod
    tenant: str
    name: str
    content: bytes = b""
    previous: str | None = None


class Stored(msgspec.Struct, tag="stored"):
    """The result of a call of the table of stored responses."""

    number: int
    contents: list[bytes] | None = None
    is_done: bool = False


class Progress(msgspec.Struct, tag="progress"):
    """The progress of the engine's start."""

    stage: str
    completed: int
    total: int


class Ready(msgspec.Struct, tag="ready"):
    """The engine is loaded."""

    facts: dict[str, Any]


class Listening(msgspec.Struct, tag="listening"):
    """An API process accepts connections."""


class Failed(msgspec.Struct, tag="failed"):
    """A process could not start."""

    error: WireError


class Ended(msgspec.Struct, tag="ended"):
    """The last message of an API process: whether all its requests were complete."""

    whole: bool


ToProcess = Setup | Connect | Drain | Close | GiveUp | Restored | Scrape | Samples | Stored
FromProcess = (
    Progress | Ready | Listening | Failed | Ended | Lost | Restored | Scrape | Samples | Store
)


class Control(Link):
    """A `Link` that also carries sockets; ``sockets`` are those received and not taken yet."""

    sockets: deque[socket.socket]
    # queued sockets, each with the offset of its message in the queued bytes
    _queued: deque[tuple[int, socket.socket]]

    def __init__(
        self,
        link: socket.socket,
        kind: Any,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self.sockets, self._queued = deque(), deque()
        super().__init__(link, kind, on_message, on_end)

    def send_socket(self, message: msgspec.Struct, passed: socket.socket) -> None:
        """Send a message with a copy of a socket, which this process then closes.

        They are queued behind other messages while the socket is full."""
        frame = frame_of(message)
        with self._lock:
            if not self.is_open:
                passed.close()
                return
            self._queued.append((len(self._unsent), passed))
            self._queue(frame)

    def close(self) -> None:
        super().close()
        while self._queued:
            self._queued.popleft()[1].close()

    def _transmit(self) -> int:
        if not self._queued:
            return super()._transmit()
        offset, passed = self._queued[0]
        if offset:
            sent = self._socket.send(self._unsent[:offset])
        else:
            end = self._queued[1][0] if len(self._queued) > 1 else len(self._unsent)
            sent = socket.send_fds(self._socket, [self._unsent[:end]], [passed.fileno()])
            self._queued.popleft()
            passed.close()
        self._queued = deque((place - sent, other) for place, other in self._queued)
        return sent

    def _receive(self, size: int) -> bytes:
        content, descriptors, _, _ = socket.recv_fds(self._socket, size, _MAX_SOCKETS)
        self.sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return content


def command(module: str) -> list[str]:
    """The command line of a process with this process's module path."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from looseleaf.server.processes.{module} import main; main()"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path)]


SWITCH_SECONDS = 0.001
"""Longest wait of a thread for the interpreter while another thread of its process computes."""


def begin() -> tuple[socket.socket, Setup]:
    """The socket to the parent, which is the standard input, and the parent's first message.

    From now on this process ends with its parent."""
    link = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # a message must not wait 5 ms, Python's default, for the thread that steps or tokenizes
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.Thread(target=_end_with_parent, args=(link.fileno(),), daemon=True).start()
    return link, msgspec.msgpack.decode(read_frame(link), type=Setup)


def _end_with_parent(descriptor: int) -> None:
    watch = select.poll()
    # no event mask: only the end of the other side wakes this thread
    watch.register(descriptor, 0)
    watch.poll()
    os._exit(1)
