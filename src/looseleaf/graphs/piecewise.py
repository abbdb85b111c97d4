"""Piecewise capture: a pass as several graphs, each of consecutive layers.

A piece computes while the documents of the next piece load. The first pieces are short, because the
device is idle until they start. The last ones are short, because they run after the last load."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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


class Cutting:
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

        def cut(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer in self._starts:
                self.end()
                self.begin()
            return attend(layer, q, k, v)

        return cut
