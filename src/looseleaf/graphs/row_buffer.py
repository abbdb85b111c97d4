"""The row table of a pass at fixed addresses, for graphs.

The host writes it for every pass, and the pass copies it to the device."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer
from looseleaf.attention.plan.lists import IntArray

# token, slot, offset and first slot of a padding row
_PADDING = np.array([[0], [-1], [0], [-1]])


class RowBuffer:
    """Five numbers of up to ``capacity`` rows: token, slot, offset in the segment, slot before late
    rows enter, and logit rows. The slot of padding rows and of rows that have not entered is -1.

    ``numbers`` is one tensor. The host buffer is single, so a writer waits until the previous
    `fetch` has ended."""

    numbers: Int[Tensor, "5 capacity"]

    def __init__(self, capacity: int, device: torch.device) -> None:
        # 64 bits each
        size = 2 * 5 * capacity
        self._buffer = PinnedBuffer({"rows": size}, device)
        self.numbers = self._buffer.tensors["rows"].view(torch.int64).view(5, capacity)
        self._host = self._buffer.numbers[:size].view(np.int64).reshape(5, capacity)

    def load(
        self, table: IntArray, logit_rows: Sequence[int], late_rows: Iterable[IntArray] = ()
    ) -> None:
        """Write ``table`` of a `RowInputs`, its logit rows, and its late rows."""
        host, num_rows = self._host, table.shape[1]
        host[:3, :num_rows] = table
        host[3, :num_rows] = table[1]
        for rows in late_rows:
            host[3, rows] = -1
        host[:4, num_rows:] = _PADDING
        host[4] = 0
        host[4, : len(logit_rows)] = logit_rows

    def clear(self) -> None:
        self._host[:4] = _PADDING
        self._host[4] = 0

    def fetch(self) -> None:
        """Copy the written numbers to the device, in stream order."""
        self._buffer.fetch()
