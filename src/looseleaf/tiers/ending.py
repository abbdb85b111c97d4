"""Joins threads before the interpreter exits.

At exit the interpreter unwinds threads that return from C++, and their destructors abort the
process (``terminate called without an active exception``). Freeing a CUDA event is enough. So each
owner of threads joins them, even if the caller never calls close()."""

import threading
import time
from collections.abc import Iterable


def join_all(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Joins all started threads within ``seconds`` in total; returns whether all ended.

    Must not be called by one of them."""
    end = time.monotonic() + seconds
    started = [thread for thread in threads if thread.ident is not None]
    for thread in started:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in started)
