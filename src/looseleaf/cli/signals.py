"""The SIGTERM handler of a server that is still starting."""

import os
import signal
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
