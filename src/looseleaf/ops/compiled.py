"""Counts the GPU kernels that this process has compiled or loaded.

The first launch with new argument types compiles a kernel or loads it from disk. That takes
seconds, during which the step waits."""

import sys
from functools import lru_cache
from typing import Any


def num_compiled() -> int:
    """Kernels of `looseleaf.ops` compiled or loaded so far, per kind of arguments and device."""
    return sum(
        len(cache[0])
        for kernel in _kernels(len(sys.modules))
        for cache in list(kernel.device_caches.values())
    )


@lru_cache(maxsize=1)
def _kernels(num_modules: int) -> tuple[Any, ...]:
    """All kernels of the loaded modules, cached per number of modules.

    The engine counts at every step, and a scan of thousands of modules takes 0.1 ms."""
    kernels = {}
    # a copy of the dict is atomic; a list of its items is not while other threads import
    for name, module in sys.modules.copy().items():
        if not (name.startswith("looseleaf.ops.") and name.endswith(".kernel")):
            continue
        for value in vars(module).values():
            # triton's cache of a kernel, by device; its first element is the compiled kernels
            if getattr(value, "device_caches", None) is not None:
                kernels[id(value)] = value
    return tuple(kernels.values())
