"""The child's side: one job after another, each under its limits. Imports no PyTorch.

The kernel enforces the limits: a signal ends the process when a job's CPU time is over, whatever
code holds the interpreter, and even if the parent is gone by then."""

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
    """Serve the socket that is standard input until the parent closes it."""
    link = socket.socket(fileno=os.dup(0))
    # an interrupt of the terminal is for the parent, which ends its children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        start = receive(link, math.inf)
        os.nice(start["nice"])
        # a large tokenizer or vocabulary is loaded here, before any limit
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
        # a panic of a Rust library is no Exception
        frame = encode({"refused": f"{type(error).__name__}: {error}"[:2000]})
    signal.setitimer(signal.ITIMER_PROF, 0)
    _limit_memory(base, None)
    return frame


def _address_space() -> int | None:
    """Bytes of address space in use, None where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _limit_memory(base: int | None, mib: int | None) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = hard if mib is None or base is None else base + mib * _MIB
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    # macOS refuses this limit; the limit of time holds there
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def command() -> list[str]:
    """The command line of a child that finds modules where this process does."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from looseleaf.sandbox.child import main; main()"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path)]
