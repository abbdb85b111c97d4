"""Tier lookups with a time limit, on a thread per tier.

A call to a network disk or a server can hang for minutes. The engine looks up documents between two
steps and can't wait that long."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.base import Tier, TierFault

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Lookup(Generic[T]):
    """One call and its result; ``answer`` is the default until ``done``."""

    def __init__(self, act: Callable[[Tier], T], default: T) -> None:
        self.act = act
        self.answer = default
        self.default = default
        self.done = threading.Event()


@dataclass(eq=False)
class LookupThread:
    """Runs the lookups of one tier one after another, for one calling thread."""

    guard: Guard
    _lookups: "queue.SimpleQueue[_Lookup[Any] | None]" = field(default_factory=queue.SimpleQueue)
    _pending: _Lookup[Any] | None = None
    thread: threading.Thread | None = None

    def call(self, act: Callable[[Tier], T], default: T, seconds: float) -> T:
        """The result of ``act``. Returns ``default`` if the call fails, takes longer than
        ``seconds``, or the previous call still runs."""
        if self._pending is not None and not self._pending.done.is_set():
            self.guard.counters.skipped += 1
            return default
        if not self._has_thread():
            return default
        self._pending = lookup = _Lookup(act, default)
        self._lookups.put(lookup)
        if lookup.done.wait(seconds):
            return lookup.answer
        self.guard.fail(TierFault("timeout", f"no answer within {seconds:g} s"))
        return default

    def close(self) -> None:
        """Ends the thread after its pending calls."""
        self._lookups.put(None)

    def _has_thread(self) -> bool:
        """Starts the thread if need be; returns whether it runs."""
        if self.thread is None:
            name = f"looseleaf-{self.guard.name}-asking"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # a lack of threads is temporary and no fault of the tier
                self.guard.counters.count_fault("unavailable")
                _log.warning("no thread can be started for the %s tier: %s", self.guard.name, error)
                return False
            self.thread = thread
        return True

    def _work(self) -> None:
        while (lookup := self._lookups.get()) is not None:
            lookup.answer = self.guard.call(lookup.act, lookup.default, proof=False)
            lookup.done.set()
