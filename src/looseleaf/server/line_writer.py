"""A stream whose writes happen in a separate thread, so a stalled reader blocks no caller."""

import atexit
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

MAX_LINES = 10_000
"""Capacity of the queue; further lines are dropped."""

_CLOSE_SECONDS = 2.0
"""Time limit for the remaining lines at close."""


class LineWriter:
    """A thread-safe text stream of lines over ``stream``. Writes neither block nor raise.

    It drops and counts lines that fail, and lines beyond ``capacity`` queued lines."""

    def __init__(self, stream: Any = None, capacity: int = MAX_LINES) -> None:
        self._stream, self._capacity = stream or sys.stderr, capacity
        # unlike `Queue` it is reentrant: a destructor may write during a put
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="looseleaf-log", daemon=True)
        self._started = False

    @property
    def is_full(self) -> bool:
        """Whether a line would be dropped now."""
        return self._lines.qsize() >= self._capacity

    def drop(self) -> None:
        """Count a line that was never formatted."""
        self._dropped += 1

    def take_dropped(self) -> int:
        """The number of lines dropped since the previous call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def write(self, line: str) -> None:
        """Queue a line, which includes its line end."""
        if self.is_full:
            self.drop()
            return
        self._lines.put(line)
        if not self._started:
            self._started = True
            # also flushes after an error that skips `close`
            atexit.register(self.close)
            self._thread.start()

    def flush(self) -> None:
        """Nothing: every line is queued for writing immediately."""

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Write the remaining lines, for at most ``timeout`` seconds."""
        atexit.unregister(self.close)
        self._lines.put(None)
        if self._started:
            self._thread.join(timeout)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError):
                self._dropped += 1

    def _write(self, line: str) -> None:
        if self._stream is sys.__stderr__:
            # bypass Python's buffer: the interpreter aborts at exit if a thread holds its lock
            rest = line.encode("utf-8", "replace")
            while rest:
                rest = rest[os.write(sys.__stderr__.fileno(), rest) :]
            return
        self._stream.write(line)
        self._stream.flush()
