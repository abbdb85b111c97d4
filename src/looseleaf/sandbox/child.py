"""The child process: runs one job after another, each under its limits, without PyTorch.

The kernel enforces the limits. A timer signal ends the process even if native code holds the
interpreter lock or the parent has died."""

import contextlib
import json
import math
import os
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidRequest
from looseleaf.sandbox.frames import encode, receive, send

_MIB = 1 << 20


def main() -> None:
    """Serve jobs over the socket on standard input until the parent closes it."""
    link = socket.socket(fileno=os.dup(0))
    # the parent handles Ctrl-C and ends its children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        start = receive(link, math.inf)
        os.nice(start["nice"])
        # loading a large tokenizer or vocabulary is not limited
        job = import_module(start["job"]).make(start["setup"])
        base = _address_space()
        send(link, encode({"ready": True}), math.inf)
        while True:
            order = receive(link, math.inf)
            send(link, _answer(job, order, base), math.inf)


def _answer(job: Any, order: dict[str, Any], base: int | None) -> bytes:
    _limit_memory(base, order["mib"])
    signal.setitimer(signal.ITIMER_PROF, order["seconds"])
    try:
        frame = encode({"value": job(order["request"])})
        if len(frame) > order["output"]:
            frame = encode({"over": "output"})
    except InvalidRequest as error:
        frame = encode({"refused": str(error)[:2000]})
    except MemoryError:
        frame = encode({"over": "memory"})
    except BaseException as error:
        # a panic of a Rust library is not an Exception
        frame = encode({"refused": f"{type(error).__name__}: {error}"[:2000]})
    signal.setitimer(signal.ITIMER_PROF, 0)
    _limit_memory(base, None)
    return frame


def _address_space() -> int | None:
    """Bytes of address space in use, None if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _limit_memory(base: int | None, mib: int | None) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if mib is None or base is None else base + mib * _MIB
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    # macOS refuses this limit, and only the time limit applies
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def command() -> list[str]:
    """The command line of a child with this process's module path."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from looseleaf.sandbox.child import main; main()"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path)]
