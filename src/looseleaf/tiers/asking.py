"""Questions to a tier that nobody waits for long: asked in a thread, answered in time or not.

A disk on a network, or a server, can leave a call hanging for minutes; the engine asks what a tier
has between two steps, and has no minutes."""

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


class _Question(Generic[T]):
    """What is asked, and the answer once it is there."""

    def __init__(self, act: Callable[[Tier], T], otherwise: T) -> None:
        self.act = act
        self.answer = otherwise
        self.otherwise = otherwise
        self.done = threading.Event()


@dataclass(eq=False)
class Asker:
    """Asks one tier, one question at a time; who asks is one thread."""

    guard: Guard
    _questions: "queue.SimpleQueue[_Question[Any] | None]" = field(
        default_factory=queue.SimpleQueue
    )
    _open: _Question[Any] | None = None
    thread: threading.Thread | None = None

    def ask(self, act: Callable[[Tier], T], otherwise: T, seconds: float) -> T:
        """What ``act`` makes of the tier, or ``otherwise`` if that fails, takes longer than
        ``seconds``, or the question before has not come back yet."""
        if self._open is not None and not self._open.done.is_set():
            self.guard.counters.skipped += 1
            return otherwise
        if not self._has_thread():
            return otherwise
        self._open = question = _Question(act, otherwise)
        self._questions.put(question)
        if question.done.wait(seconds):
            return question.answer
        self.guard.fail(TierFault("timeout", f"no answer within {seconds:g} s"))
        return otherwise

    def close(self) -> None:
        """End the thread, after what it was asked."""
        self._questions.put(None)

    def _has_thread(self) -> bool:
        """Whether there is a thread to ask, or one could be started."""
        if self.thread is None:
            name = f"looseleaf-{self.guard.name}-asking"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # the system has no more threads, for now: no reason to leave the tier alone
                self.guard.counters.count_fault("unavailable")
                _log.warning("no thread to ask the %s tier with: %s", self.guard.name, error)
                return False
            self.thread = thread
        return True

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            question.answer = self.guard.call(question.act, question.otherwise, proof=False)
            question.done.set()
