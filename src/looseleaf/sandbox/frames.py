"""Messages between parent and child: length-prefixed JSON over a socket.

Unlike pickle, JSON from a compromised child can't execute code in its parent."""

import json
import socket
import time
from typing import Any

_LENGTH = 8


def encode(message: Any) -> bytes:
    """A frame; half surrogates are escaped."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return len(body).to_bytes(_LENGTH, "big") + body


def send(link: socket.socket, frame: bytes, due: float) -> None:
    """Send a frame. Raises TimeoutError at ``due`` (monotonic), OSError if the peer ended."""
    link.settimeout(_timeout(due))
    link.sendall(frame)


def receive(link: socket.socket, due: float) -> Any:
    """The next message. Raises TimeoutError at ``due``, EOFError if the peer ended."""
    size = int.from_bytes(_read(link, _LENGTH, due), "big")
    return json.loads(_read(link, size, due))


def _read(link: socket.socket, size: int, due: float) -> bytearray:
    content = bytearray()
    while len(content) < size:
        link.settimeout(_timeout(due))
        piece = link.recv(min(size - len(content), 1 << 20))
        if not piece:
            raise EOFError("the other process has ended")
        content += piece
    return content


def _timeout(due: float) -> float | None:
    if due == float("inf"):
        return None
    seconds = due - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds
