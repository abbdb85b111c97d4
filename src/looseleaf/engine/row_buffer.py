"""The numbers of a pass's rows at fixed addresses, for graphs: written anew for every pass, in one
copy."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.lists import IntArray


class RowBuffer:
    """Of up to ``capacity`` rows token, slot, place, and the slot until late rows enter; then which
    rows' logits are wanted. Rows that pad have slot -1, and so do those that have not entered.

    Two staging areas are used in turn, so that numbers can be written while the device still reads
    those before. ``numbers`` is always the same tensor."""

    numbers: Int[Tensor, "5 capacity"]

    def __init__(self, capacity: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.numbers = torch.zeros((5, capacity), dtype=torch.int64, device=device)
        self._staging = [
            torch.zeros((5, capacity), dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)
        ]
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0

    def load(self, table: IntArray, wanted: Sequence[int], late: Iterable[IntArray] = ()) -> None:
        """Send the rows of ``table``, which is that of `RowInputs`; those in ``late`` enter
        later."""
        staging, sent = self._staging[self._turn], self._sent[self._turn]
        self._turn = 1 - self._turn
        if sent is not None:
            sent.synchronize()
        told, rows = staging.numpy(), table.shape[1]
        told[:3, :rows] = table
        told[3, :rows] = table[1]
        for some in late:
            told[3, some] = -1
        told[[1, 3], rows:] = -1
        told[[0, 2], rows:] = 0
        told[4, : len(wanted)] = wanted
        told[4, len(wanted) :] = 0
        self.numbers.copy_(staging, non_blocking=True)
        if sent is not None:
            sent.record()

    def clear(self) -> None:
        """No rows."""
        self.numbers.zero_()
        self.numbers[1].fill_(-1)
        self.numbers[3].fill_(-1)
