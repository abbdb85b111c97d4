"""What is kept of every page beside its keys and values: bounds, representative keys.

The third kind of thing that lives with the pool, beside pages and patches. A summary belongs to one
life of a page: it is made the first time that somebody asks for it once the page is full and final,
and a page that was handed out again since has none, however often its number comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.kv.pool import PagePool

Array = npt.NDArray[np.int64]
# keys of so many pages are looked at at a time, all layers of them
_PAGES_AT_A_TIME = 64


@dataclass(frozen=True)
class Summary:
    """A kind of summary: ``width`` vectors of a head's size for each page and KV head.

    ``of`` makes them from keys ``[layers, pages, kv_heads, page_size, head_dim]``, of which each
    page has so many ``[pages]``: ``[layers, pages, kv_heads, width * head_dim]``, in the frame of
    the segment, in the dtype of the keys.
    """

    name: str
    width: int
    of: Callable[[Tensor, Tensor], Tensor]


class PageSummaries:
    """Summaries of one kind for the pages of a pool, in memory of its own."""

    def __init__(self, pool: PagePool, summary: Summary) -> None:
        self.pool = pool
        self.summary = summary
        layers, _, pages, heads, _, head_dim = pool.kv.shape
        width = summary.width * head_dim
        # what is stored in eight bits is exact in sixteen, which know least and largest
        device, stored = pool.kv.device, pool.kv.dtype
        dtype = torch.bfloat16 if stored.itemsize == 1 else stored
        # as the keys are: on the CPU all pages of a head lie together, on a GPU all heads of a page
        if device.type == "cpu":
            lying = torch.zeros(layers, heads, pages, width, dtype=dtype)
            self._table = lying.transpose(1, 2)
        else:
            self._table = torch.zeros(layers, pages, heads, width, dtype=dtype, device=device)
        self._lives = np.zeros(pages, dtype=np.int64)

    def layer(self, layer: int) -> Float[Tensor, "pages kv_heads vectors"]:
        """The summaries of one layer, a view; only those that were written mean anything."""
        return self._table[layer]

    def write(self, pages: Sequence[int] | npt.NDArray[np.integer[Any]], num_keys: Array) -> int:
        """Summaries of ``pages``, which are final and hold so many keys, where they are missing.

        Returns how many were made."""
        held = np.asarray(pages, dtype=np.int64)
        stale = np.flatnonzero(self._lives[held] != self.pool.generations[held])
        for first in range(0, len(stale), _PAGES_AT_A_TIME):
            some = stale[first : first + _PAGES_AT_A_TIME]
            self._write(held[some], num_keys[some])
        return len(stale)

    def _write(self, pages: Array, num_keys: Array) -> None:
        index, counts = (self._sent(a) for a in (pages, num_keys))
        keys = self.pool.kv[:, 0, index].to(self._table.dtype)
        self._table[:, index] = self.summary.of(keys, counts)
        self._lives[pages] = self.pool.generations[pages]

    def _sent(self, numbers: Array) -> Tensor:
        """On the device of the table, which is not waited for."""
        host, device = torch.from_numpy(numbers), self._table.device
        if device.type == "cuda":
            host = host.pin_memory()
        return host.to(device, non_blocking=True)
