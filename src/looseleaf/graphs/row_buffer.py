"""The numbers of a pass's rows at fixed addresses, for graphs: written anew for every pass, which
fetches them."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer
from looseleaf.attention.plan.lists import IntArray

# token, slot, place and first slot of a row that is none
_PADDING = np.array([[0], [-1], [0], [-1]])


class RowBuffer:
    """Of up to ``capacity`` rows token, slot, place, and the slot until late rows enter; then which
    rows' logits are wanted. Rows that pad have slot -1, and so do those that have not entered.

    ``numbers`` is always the same tensor. There is one place to write them to: who does so waits
    until what stood there has been fetched."""

    numbers: Int[Tensor, "5 capacity"]

    def __init__(self, capacity: int, device: torch.device) -> None:
        # 64 bits each
        size = 2 * 5 * capacity
        self._buffer = PinnedBuffer({"rows": size}, device)
        self.numbers = self._buffer.tensors["rows"].view(torch.int64).view(5, capacity)
        self._told = self._buffer.numbers[:size].view(np.int64).reshape(5, capacity)

    def load(self, table: IntArray, wanted: Sequence[int], late: Iterable[IntArray] = ()) -> None:
        """Write the rows of ``table``, which is that of `RowInputs`; those in ``late`` enter
        later."""
        told, rows = self._told, table.shape[1]
        told[:3, :rows] = table
        told[3, :rows] = table[1]
        for some in late:
            told[3, some] = -1
        told[:4, rows:] = _PADDING
        told[4] = 0
        told[4, : len(wanted)] = wanted

    def clear(self) -> None:
        self._told[:4] = _PADDING
        self._told[4] = 0

    def fetch(self) -> None:
        """Bring the written numbers to the device when it comes to this."""
        self._buffer.fetch()
