"""A pass captured as several graphs, each a stretch of layers.

The first ones are computed while the documents of the next are on their way. Stretches are short at
first, since the device has nothing else to do, and at the end, since they are what is left when the
last layer has come."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from looseleaf.types import Attend

# a layer takes about as long to arrive as to be computed: what waits for many waits long
_LONGEST = 2


def stretches(num_layers: int) -> list[int]:
    """The layers with which graphs begin: each as long as what is before it, half as long as what
    is left, and not too long."""
    lengths: list[int] = []
    while (start := sum(lengths)) < num_layers:
        lengths.append(max(1, min(start, (num_layers - start) // 2, _LONGEST)))
    return [0, *accumulate(lengths[:-1])]


class Cutting:
    """A capture that begins a new graph before the attention of each layer of ``starts``."""

    def __init__(self, starts: Sequence[int], pool: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._starts, self._pool = frozenset(starts), pool

    def begin(self) -> None:
        """The next graph."""
        self.graphs.append(torch.cuda.CUDAGraph())
        # threads of the tiers may wait for the device meanwhile
        self.graphs[-1].capture_begin(self._pool, "thread_local")

    def end(self) -> None:
        """The latest graph is complete."""
        self.graphs[-1].capture_end()

    def within(self, attend: Attend) -> Attend:
        """``attend`` with the cuts in front of it."""

        def cut(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer in self._starts:
                self.end()
                self.begin()
            return attend(layer, q, k, v)

        return cut
