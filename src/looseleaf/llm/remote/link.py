"""A stream socket as a channel of messages: frames in both directions, and its end.

Any thread may send. Frames and the end arrive in the event loop."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

_HEAD = struct.Struct("<I")
_CHUNK = 1 << 18
# an encoder has no state between messages
_ENCODER = msgspec.msgpack.Encoder()

MAX_BACKLOG = 1 << 28
"""Queued bytes above which a link closes if its peer reads nothing for `STALL_SECONDS`.

A stopped process must not fill the memory."""

STALL_SECONDS = 10.0
"""Longest pause of a busy peer between two reads."""


def frame_of(message: msgspec.Struct) -> bytearray:
    """The bytes of a message: its length and its content."""
    frame = bytearray(_HEAD.size)
    _ENCODER.encode_into(message, frame, _HEAD.size)
    _HEAD.pack_into(frame, 0, len(frame) - _HEAD.size)
    return frame


def read_frame(link: socket.socket) -> bytes:
    """The content of the next message of a blocking socket. Raises EOFError."""
    (length,) = _HEAD.unpack(_read_whole(link, _HEAD.size))
    return _read_whole(link, length)


def _read_whole(link: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = link.recv(size - len(content))
        if not piece:
            raise EOFError
        content += piece
    return content


class Link:
    """One end of a connected Unix socket.

    ``on_message`` gets every message, and ``on_end`` is called once after the peer's end or
    `close`. A peer that reads slowly keeps its link; see `MAX_BACKLOG`."""

    def __init__(
        self,
        link: socket.socket,
        kind: Any,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        link.setblocking(False)
        self._socket, self._loop = link, asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        # the time at which the socket last accepted queued bytes
        self._accepted = 0.0
        self._drained = asyncio.Event()
        self._drained.set()
        self._received = bytearray()
        self.is_open = True
        self._loop.add_reader(link, self._read)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or queue it while the socket is full; nothing after the end."""
        frame = frame_of(message)
        with self._lock:
            if not self.is_open:
                return
            sent = 0
            if not self._unsent:
                try:
                    sent = self._socket.send(frame)
                except BlockingIOError:
                    pass
                except OSError:
                    self._call_loop(self.close)
                    return
            if sent < len(frame):
                self._queue(memoryview(frame)[sent:])

    async def drained(self) -> None:
        """Return when no bytes are queued, or after the end."""
        await self._drained.wait()

    def close(self) -> None:
        """End the channel; called in the event loop."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            self._drained.set()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._on_end()

    def _queue(self, content: bytearray | memoryview) -> None:
        """Send ``content`` after all queued bytes; called with the lock held."""
        is_first = not self._unsent
        self._unsent += content
        if is_first:
            self._accepted = time.monotonic()
            # a flag without waiters to wake, so any thread may clear it
            self._drained.clear()
            self._call_loop(self._wait_until_writable)
        elif len(self._unsent) > MAX_BACKLOG:
            is_stalled = time.monotonic() - self._accepted > STALL_SECONDS
            # the attempt excludes a peer that reads while this event loop is busy
            if is_stalled and not self._flush():
                self._call_loop(self.close)

    def _call_loop(self, function: Callable[[], None]) -> None:
        # the loop may be closed
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _wait_until_writable(self) -> None:
        if self.is_open:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._lock:
            if self._flush() and not self._unsent:
                self._loop.remove_writer(self._socket)
                self._drained.set()

    def _flush(self) -> bool:
        """Send queued bytes with the lock held; returns whether the socket accepted any."""
        try:
            sent = self._transmit()
        except BlockingIOError:
            return False
        except OSError:
            self._call_loop(self.close)
            return False
        del self._unsent[:sent]
        self._accepted = time.monotonic()
        return True

    def _transmit(self) -> int:
        """Send queued bytes; returns their number. Raises OSError."""
        return self._socket.send(self._unsent)

    def _receive(self, size: int) -> bytes:
        return self._socket.recv(size)

    def _read(self) -> None:
        try:
            content = self._receive(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content:
            self.close()
            return
        received = self._received
        received += content
        begin = 0
        while len(received) - begin >= _HEAD.size:
            (length,) = _HEAD.unpack_from(received, begin)
            end = begin + _HEAD.size + length
            if end > len(received):
                break
            message = self._decoder.decode(
                memoryview(received)[begin + _HEAD.size : end].toreadonly()
            )
            begin = end
            self._on_message(message)
            if not self.is_open:
                return
        if begin:
            del received[:begin]
