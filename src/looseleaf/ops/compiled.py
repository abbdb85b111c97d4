"""How many GPU kernels this process has made ready so far.

A kernel is compiled, or found on disk, when it is first launched with arguments of a kind: seconds
in which a step waits."""

import sys


def num_compiled() -> int:
    """Kernels of `looseleaf.ops` that were compiled or loaded in this process, counted once for
    every kind of arguments and device; 0 where none was launched."""
    counts = dict[int, int]()
    for name, module in list(sys.modules.items()):
        if not (name.startswith("looseleaf.ops.") and name.endswith(".kernel")):
            continue
        for value in vars(module).values():
            # what triton keeps for a kernel, by device: first of all the compiled ones
            caches = getattr(value, "device_caches", None)
            if caches is not None:
                counts[id(value)] = sum(len(held[0]) for held in list(caches.values()))
    return sum(counts.values())
