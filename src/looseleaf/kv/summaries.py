"""Page summaries: vectors derived from the keys of each page, such as bounds or representatives.

A summary is computed at its first use, once its page is full and final. It is valid for one
generation of the page: a new allocation of the page invalidates it."""

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
# pages per iteration, which bounds the memory of copied keys
_BATCH = 64


@dataclass(frozen=True)
class Summary:
    """A kind of summary: ``width`` vectors of ``head_dim`` for each page and KV head.

    ``of(keys, counts)`` takes keys ``[layers, pages, kv_heads, page_size, head_dim]`` and the
    number of keys in each page. It returns ``[layers, pages, kv_heads, width * head_dim]``, in the
    frame of the segment and the dtype of the keys.
    """

    name: str
    width: int
    of: Callable[[Tensor, Tensor], Tensor]


class PageSummaries:
    """Summaries of one kind for all pages of a pool."""

    def __init__(self, pool: PagePool, summary: Summary) -> None:
        self.pool = pool
        self.summary = summary
        layers, _, pages, heads, _, head_dim = pool.kv.shape
        width = summary.width * head_dim
        # bfloat16 holds eight-bit keys exactly, and PyTorch has min and max for it
        device, key_dtype = pool.kv.device, pool.kv.dtype
        dtype = torch.bfloat16 if key_dtype.itemsize == 1 else key_dtype
        # the memory layout of the pool
        if device.type == "cpu":
            self._table = torch.zeros(layers, heads, pages, width, dtype=dtype).transpose(1, 2)
        else:
            self._table = torch.zeros(layers, pages, heads, width, dtype=dtype, device=device)
        self._generations = np.zeros(pages, dtype=np.int64)

    def layer(self, layer: int) -> Float[Tensor, "pages kv_heads vectors"]:
        """A view of the summaries of the keys that one layer of the model reads; entries are
        undefined before `write`."""
        return self._table[self.pool.kv_layers[layer]]

    def write(self, pages: Sequence[int] | npt.NDArray[np.integer[Any]], num_keys: Array) -> int:
        """Compute missing summaries of ``pages``, which are final and contain ``num_keys`` keys.

        Returns the number of computed summaries."""
        numbers = np.asarray(pages, dtype=np.int64)
        stale = np.flatnonzero(self._generations[numbers] != self.pool.generations[numbers])
        for first in range(0, len(stale), _BATCH):
            batch = stale[first : first + _BATCH]
            self._write(numbers[batch], num_keys[batch])
        return len(stale)

    def _write(self, pages: Array, num_keys: Array) -> None:
        index, counts = self._to_device(pages), self._to_device(num_keys)
        keys = self.pool.kv[:, 0, index].to(self._table.dtype)
        self._table[:, index] = self.summary.of(keys, counts)
        self._generations[pages] = self.pool.generations[pages]

    def _to_device(self, numbers: Array) -> Tensor:
        """A copy on the table's device, asynchronous on a GPU."""
        host, device = torch.from_numpy(numbers), self._table.device
        if device.type == "cuda":
            host = host.pin_memory()
        return host.to(device, non_blocking=True)
