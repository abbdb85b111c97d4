"""Compiles GPU kernels together, before their first launches.

A launch compiles its kernel and waits for it, so launches in turn use one core. Here launches are
recorded first: unknown kernels are skipped and kept with their kinds of arguments. Then all of them
compile in threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SkippedKernels:
    """Kernels whose launches were skipped, by kernel and kinds of arguments."""

    _preloads: dict[tuple[int, str], Callable[[], object]] = field(default_factory=dict)

    def skip(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """The hook of Triton before a kernel compiles: True skips compilation and launch."""
        kernel, kinds = fn.jit_function, compile["specialization_data"]
        self._preloads[id(kernel), key] = lambda: kernel.preload(kinds)
        return True

    def compile(self, num_threads: int) -> None:
        """Compile all kernels in ``num_threads`` threads, or load them from disk."""
        import triton

        with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads):
            for preload in self._preloads.values():
                preload()


@contextmanager
def skipped_kernels() -> Iterator[SkippedKernels]:
    """Skip launches of kernels that this process has not compiled yet."""
    from triton import knobs

    kernels = SkippedKernels()
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = kernels.skip
        yield kernels
