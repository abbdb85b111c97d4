"""How threads end: before the interpreter does.

A thread that comes back from C++ while the interpreter ends is unwound there, through destructors
that must not be: the process aborts (``terminate called without an active exception``). That takes
no more than an event of CUDA that is freed. So whoever has threads waits for them, where nobody
closes it too."""

import threading
import time
from collections.abc import Iterable


def join_all(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Wait for all of them that were started, for so long at most together; whether they ended.

    Not to be called by one of them."""
    end = time.monotonic() + seconds
    started = [thread for thread in threads if thread.ident is not None]
    for thread in started:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in started)
