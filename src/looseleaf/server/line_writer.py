"""Lines that a thread of their own writes: a reader that stalls, or has gone, stops nobody else."""

import atexit
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

MOST_LINES = 10_000
"""Lines that wait to be written; more are dropped."""

_LAST_SECONDS = 2.0
"""What the lines that are left get at the end."""


class LineWriter:
    """A text stream to write lines to, for any thread, over ``stream``. It never waits and never
    fails: what can't be written, or finds ``most`` lines before it, is dropped and counted."""

    def __init__(self, stream: Any = None, most: int = MOST_LINES) -> None:
        self._stream, self._most = stream or sys.stderr, most
        # unlike `Queue` it may be put to by a destructor that runs within a put
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="looseleaf-log", daemon=True)
        self._begun = False

    @property
    def is_full(self) -> bool:
        """Whether a line would be dropped now."""
        return self._lines.qsize() >= self._most

    def drop(self) -> None:
        """Count a line that is not even made."""
        self._dropped += 1

    def take_dropped(self) -> int:
        """How many were dropped since this was last asked."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def write(self, line: str) -> None:
        """Have a line written, with its end."""
        if self.is_full:
            self.drop()
            return
        self._lines.put(line)
        if not self._begun:
            self._begun = True
            # where nobody closes it, as when a model can't be loaded
            atexit.register(self.close)
            self._thread.start()

    def flush(self) -> None:
        """Nothing: a line is on its way once it has been given."""

    def close(self, timeout: float = _LAST_SECONDS) -> None:
        """Write what is left, as far as that takes no longer than ``timeout`` seconds."""
        atexit.unregister(self.close)
        self._lines.put(None)
        if self._begun:
            self._thread.join(timeout)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError):
                self._dropped += 1

    def _write(self, line: str) -> None:
        if self._stream is sys.__stderr__:
            # past Python's own buffer: a thread that waits in there with its lock would have the
            # interpreter abort at its end
            left = line.encode("utf-8", "replace")
            while left:
                left = left[os.write(sys.__stderr__.fileno(), left) :]
            return
        self._stream.write(line)
        self._stream.flush()
