"""How many GPU kernels this process has made ready so far.

A kernel is compiled, or found on disk, when it is first launched with arguments of a kind: seconds
in which a step waits."""

import sys
from functools import lru_cache
from typing import Any


def num_compiled() -> int:
    """Kernels of `looseleaf.ops` that were compiled or loaded in this process, counted once for
    every kind of arguments and device; 0 where none was launched."""
    return sum(
        len(held[0])
        for kernel in _kernels(len(sys.modules))
        for held in list(kernel.device_caches.values())
    )


@lru_cache(maxsize=1)
def _kernels(num_modules: int) -> tuple[Any, ...]:
    """All kernels of the modules that are loaded, while these are so many: to look through
    thousands takes a tenth of a millisecond, and an engine counts at every step."""
    found = {}
    # a copy is made in one piece, where a list of pairs is not: other threads import meanwhile
    for name, module in sys.modules.copy().items():
        if not (name.startswith("looseleaf.ops.") and name.endswith(".kernel")):
            continue
        for value in vars(module).values():
            # what triton keeps for a kernel, by device: first of all the compiled ones
            if getattr(value, "device_caches", None) is not None:
                found[id(value)] = value
    return tuple(found.values())
