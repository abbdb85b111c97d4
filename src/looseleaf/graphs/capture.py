"""Capture: a step or pass as CUDA graphs, whole or in pieces of consecutive layers.

A piece computes while the documents of the next piece load. The first pieces are short, because the
device is idle until they start. The last ones are short, because they run after the last load."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from looseleaf.types import Attend

# loading a layer takes about as long as computing it, so longer pieces wait longer
_LONGEST = 2


def stretches(num_layers: int) -> list[int]:
    """The first layer of each piece. A piece is at most as long as all earlier layers, half of the
    remaining layers, and `_LONGEST`."""
    lengths: list[int] = []
    while (start := sum(lengths)) < num_layers:
        lengths.append(max(1, min(start, (num_layers - start) // 2, _LONGEST)))
    return [0, *accumulate(lengths[:-1])]


Within = Callable[[Attend], Attend]


@runtime_checkable
class Replayable(Protocol):
    """A capture that runs again over the current content of its tensors."""

    def replay(self) -> None: ...


class Captures:
    """Captures work on one device; the graphs share their memory.

    A rehearsal computes nothing: launches are recorded, and the graphs are useless."""

    def __init__(self, device: torch.device, *, rehearsal: bool = False) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._rehearsal = rehearsal

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """The single stream of captures, because each stream keeps its memory."""
        return torch.cuda.Stream(self._device)

    def capture(
        self,
        run: Callable[[Within], Tensor],
        starts: Sequence[int] = (),
        rewind: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Sequence[Replayable]]:
        """The result of ``run``, which replays overwrite, and its graphs.

        A new graph begins before the attention of each layer of ``starts``, for which ``run`` wraps
        its attention by its argument. A first run without rows precedes the capture; ``rewind`` is
        called after it."""
        side, cutting = self._side, _Cutting(starts, self._pool)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if not self._rehearsal:
                # compiles kernels and allocates, which a capture must not do
                run(lambda attend: attend)
                rewind()
            torch.cuda.synchronize(self._device)
            # the graph's own memory is new; the cache can't be emptied during a capture
            torch.cuda.empty_cache()
            with _undisturbed():
                cutting.begin()
                try:
                    result = run(cutting.within)
                finally:  # a stream that still captures would take nothing else
                    cutting.end()
        torch.cuda.current_stream().wait_stream(side)
        return result, cutting.graphs


class _Cutting:
    """A capture that begins a new graph before the attention of each layer of ``starts``."""

    def __init__(self, starts: Sequence[int], pool: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._starts, self._pool = frozenset(starts), pool

    def begin(self) -> None:
        """Begin the next graph."""
        self.graphs.append(torch.cuda.CUDAGraph())
        # threads of the tiers may wait for the device during the capture
        self.graphs[-1].capture_begin(self._pool, "thread_local")

    def end(self) -> None:
        """Complete the current graph."""
        self.graphs[-1].capture_end()

    def within(self, attend: Attend) -> Attend:
        """``attend``, which begins a new graph before the layers of ``starts``."""

        def cut(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            if layer in self._starts:
                self.end()
                self.begin()
            return attend(layer, q, k, v)

        return cut


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collection, which must not free an old graph during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
