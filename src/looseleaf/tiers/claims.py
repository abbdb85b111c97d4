"""Claims: of several engines with one shared tier, one computes a document and others wait.

An engine announces a document in the shared tier before it computes it, and renews the claim until
the document is stored. Another engine waits for the record, and takes over a claim that is no
longer renewed. It computes the document itself if the tier fails, or after ``patience`` seconds.
Waiting engines look at random intervals that grow, so they do not act in step."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable
from uuid import uuid4

from looseleaf.kv.keys import SegmentKey

State = Literal["new", "theirs", "ours", "stored", "free"]
"""``new``: not announced yet. ``theirs``: another engine computes it. ``free``: no claim helps."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_IDLE_SECONDS = 5.0
"""Time after which a claim is given up that no computation followed, and a state is forgotten."""


@runtime_checkable
class ClaimStore(Protocol):
    """The shared tier. Calls may raise any exception."""

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]: ...
    def claim(self, key: SegmentKey, owner: str, seconds: float) -> bool: ...
    def release(self, key: SegmentKey, owner: str) -> None: ...


@dataclass(eq=False)
class _Entry:
    state: State
    begun: float
    due: float
    pause: float = _FIRST_PAUSE
    used: float = 0.0


@dataclass(eq=False)
class Claims:
    """The claims of one engine. `awaits` and `stored` never block.

    A claim holds for ``seconds`` and is renewed while ``is_computing`` its key. One thread talks to
    the store."""

    store: ClaimStore
    is_computing: Callable[[SegmentKey], bool]
    seconds: float = 10.0
    patience: float = 60.0
    clock: Callable[[], float] = time.monotonic
    owner: str = field(default_factory=lambda: uuid4().hex)
    _entries: dict[SegmentKey, _Entry] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _down_until: float = float("-inf")
    thread: threading.Thread | None = None

    def awaits(self, keys: Iterable[SegmentKey]) -> bool:
        """Whether one of these missing documents is, or may be, computed by another engine."""
        now, waits = self.clock(), False
        if now < self._down_until:
            return False
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry("new", now, now)
                    self._start()
                    self._changed.notify_all()
                entry.used = now
                waits = waits or entry.state in ("new", "theirs")
        return waits

    def stored(self, key: SegmentKey) -> None:
        """The engine has stored a document, or has failed to: end the claim."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None and entry.state == "ours":
                entry.state, entry.due = "free", self.clock()
                entry.used = float("-inf")
                self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for a change of any state, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        """End the thread, which releases all claims of this engine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def step(self) -> float:
        """Handle all entries that are due; the seconds until the next one. For the thread."""
        now = self.clock()
        with self._changed:
            due = [(key, entry) for key, entry in self._entries.items() if entry.due <= now]
        for key, entry in due:
            self._advance(key, entry, now)
        with self._changed:
            if due:
                self._changed.notify_all()
            nexts = [entry.due for entry in self._entries.values()]
        return min((max(0.0, moment - self.clock()) for moment in nexts), default=_IDLE_SECONDS)

    def _advance(self, key: SegmentKey, entry: _Entry, now: float) -> None:
        if entry.state in ("stored", "free"):
            if now - entry.used >= _IDLE_SECONDS:
                self._forget(key, entry)
            entry.due = now + _IDLE_SECONDS
            return
        if entry.state == "ours" and not self.is_computing(key):
            if now - entry.used >= _IDLE_SECONDS:
                self._forget(key, entry)
            else:
                entry.due = now + 1.0
            return
        state = self._ask(key, entry, now)
        with self._changed:
            # the engine may have stored it meanwhile
            if entry.state != "free":
                entry.state = state
        if state == "theirs":
            entry.pause = min(_LONGEST_PAUSE, 2 * entry.pause)
            entry.due = now + entry.pause * (0.5 + random.random())
        else:
            entry.due = now + (self.seconds / 3 if state == "ours" else _IDLE_SECONDS)

    def _ask(self, key: SegmentKey, entry: _Entry, now: float) -> State:
        try:
            if entry.state != "ours" and self.store.contains([key])[0]:
                return "stored"
            if self.store.claim(key, self.owner, self.seconds):
                # the earlier owner may have stored it before it released its claim
                if entry.state != "ours" and self.store.contains([key])[0]:
                    self.store.release(key, self.owner)
                    return "stored"
                return "ours"
        except Exception:
            # the tier's guard counts and logs the faults of reads and writes
            self._down_until = self.clock() + _IDLE_SECONDS
            return "free"
        return "theirs" if now - entry.begun < self.patience else "free"

    def _forget(self, key: SegmentKey, entry: _Entry) -> None:
        with self._changed:
            self._entries.pop(key, None)
        with suppress(Exception):
            # harmless for a claim of another engine
            self.store.release(key, self.owner)

    def _start(self) -> None:
        if self.thread is None and not self._closed:
            self.thread = threading.Thread(target=self._work, name="looseleaf-claims", daemon=True)
            self.thread.start()

    def _work(self) -> None:
        while True:
            seconds = self.step()
            with self._changed:
                if self._closed:
                    break
                new = any(entry.due <= self.clock() for entry in self._entries.values())
                if not new:
                    self._changed.wait(seconds)
        for key, entry in list(self._entries.items()):
            if entry.state == "ours":
                self._forget(key, entry)
