"""Int32 arrays at fixed device addresses, and the pinned host memory that feeds them."""

from collections.abc import Mapping

import torch

from looseleaf.attention.plan.lists import IntArray, array_starts, views
from looseleaf.ops.fetch_numbers import BLOCK, fetch_numbers, fetch_turn, num_blocks


class PinnedBuffer:
    """Int32 arrays of fixed ``sizes``; ``tensors`` on the device are always the same objects.

    `fetch` is a captured copy, `send` a copy outside of graphs. With one side of host memory a
    writer first waits until its numbers are fetched. With two sides the host writes one while the
    device reads the other. A fetch copies only the written blocks of a side. The caller reports a
    replay, which fetches once, by `sent`, and a fetch outside of a replay by `unsent`."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, *, sides: int = 1) -> None:
        self._starts, length = array_starts(sizes)
        # a side begins with the count of numbers to fetch in each block
        self._blocks = num_blocks(length) if sides > 1 else 0
        on_gpu = device.type == "cuda"
        self._flat = torch.zeros(length, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(1, dtype=torch.int64, device=device)
        size = sides, self._blocks + length
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in range(sides)]
        self._side = 0
        self.tensors = views(self._flat, sizes)

    def load(self, arrays: Mapping[str, IntArray]) -> None:
        """Write ``arrays``, none longer than its size. Numbers after a shorter array keep their
        values with one side, and are undefined with two."""
        if (sent := self._sent[self._side]) is not None:
            sent.synchronize()
        numbers, used = self.numbers, [0] * self._blocks
        for name, array in arrays.items():
            start = self._starts[name]
            end = start + len(array)
            numbers[start:end] = array
            if used and end > start:
                last = (end - 1) // BLOCK
                for block in range(start // BLOCK, last):
                    used[block] = BLOCK
                used[last] = max(used[last], end - last * BLOCK)
        self._numbers[self._side, : self._blocks] = used

    @property
    def numbers(self) -> IntArray:
        """All numbers of the side that is written next, in host memory."""
        side: IntArray = self._numbers[self._side, self._blocks :]
        return side

    def fetch(self) -> None:
        """Copy the written numbers to the device, in stream order."""
        if self._blocks:
            fetch_turn(self._host, self._flat, self._fetched)
        else:
            fetch_numbers(self._host[0], self._flat)

    def send(self) -> None:
        """Copy the written numbers to the device after all its queued work, and switch to the other
        side."""
        self._flat.copy_(self._host[self._side, self._blocks :], non_blocking=True)
        self.sent()

    def sent(self) -> None:
        """Report a launched replay or copy: the next one reads the other side."""
        if (sent := self._sent[self._side]) is not None:
            sent.record()
        self._side = (self._side + 1) % len(self._sent)

    def unsent(self) -> None:
        """Report that the last fetch belongs to no replay."""
        self._fetched -= self._blocks
