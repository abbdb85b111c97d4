"""Messages between a process and its child: JSON behind its length, over one socket.

JSON, and no pickle: a child that runs untrusted input must not make its parent run anything."""

import json
import socket
import time
from typing import Any

_LENGTH = 8


def encode(message: Any) -> bytes:
    """A frame; half surrogates travel as escapes."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return len(body).to_bytes(_LENGTH, "big") + body


def send(link: socket.socket, frame: bytes, due: float) -> None:
    """Send a frame. Raises TimeoutError at ``due`` (monotonic), OSError if the peer is gone."""
    link.settimeout(_left(due))
    link.sendall(frame)


def receive(link: socket.socket, due: float) -> Any:
    """The next message. Raises TimeoutError at ``due``, EOFError if the peer is gone."""
    size = int.from_bytes(_read(link, _LENGTH, due), "big")
    return json.loads(_read(link, size, due))


def _read(link: socket.socket, size: int, due: float) -> bytearray:
    content = bytearray()
    while len(content) < size:
        link.settimeout(_left(due))
        piece = link.recv(min(size - len(content), 1 << 20))
        if not piece:
            raise EOFError("the other process has ended")
        content += piece
    return content


def _left(due: float) -> float | None:
    if due == float("inf"):
        return None
    left = due - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return left
