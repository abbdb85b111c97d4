"""Handlers of signals: SIGTERM while a server starts, SIGINT while an answer is printed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def exit_on_sigterm() -> None:
    """Make SIGTERM end the process immediately, also as the first process of a container.

    The kernel ignores the default action of signals for process 1."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # reached only by process 1
    os._exit(128 + number)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Defer the first SIGINT until the yielded function is called, which raises KeyboardInterrupt.

    So an answer ends between two steps of the engine. A second SIGINT raises immediately."""
    is_pending = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    def check() -> None:
        if is_pending:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
