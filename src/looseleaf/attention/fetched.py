"""Int32 arrays that graphs fetch themselves."""

from collections.abc import Mapping

import torch

from looseleaf.attention.lists import IntArray, places, views
from looseleaf.ops.fetch_numbers import BLOCK, fetch_numbers, fetch_turn, num_blocks


class FetchedInts:
    """Int32 arrays of fixed sizes at fixed addresses on a device, and in memory of the host what
    they are when they are next fetched. ``tensors`` are always the same objects.

    There is one such memory: who writes to it waits until what stood there has been fetched."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._starts, length = places(sizes)
        self._flat = torch.zeros(length, dtype=torch.int32, device=device)
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self.tensors = views(self._flat, sizes)

    def load(self, arrays: Mapping[str, IntArray]) -> None:
        """Write ``arrays``, none of which is longer than its size; what is behind a shorter one is
        left as it was."""
        for name, array in arrays.items():
            start = self._starts[name]
            self._numbers[start : start + len(array)] = array

    def fetch(self) -> None:
        """Bring to the device what is written when it comes to this."""
        fetch_numbers(self._host, self._flat)


class TurnedInts:
    """The same in two memories that are used in turn, so that what a replay fetches may be written
    while the one before still runs; of each as much is fetched as is written.

    Who fetches once a replay says when that was asked for (`sent`); and of a run that is none, that
    it was (`unsent`)."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        starts, length = places(sizes)
        self._starts, self._blocks = starts, num_blocks(length)
        on_gpu = device.type == "cuda"
        self._flat = torch.zeros(length, dtype=torch.int32, device=device)
        self._fetched = torch.zeros(1, dtype=torch.int64, device=device)
        size = 2, self._blocks + length
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0
        self.tensors = views(self._flat, sizes)

    def load(self, arrays: Mapping[str, IntArray]) -> None:
        """Write ``arrays``, none of which is longer than its size; what is behind a shorter one may
        be anything."""
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        row, used = self._numbers[self._turn], [0] * self._blocks
        numbers = row[self._blocks :]
        for name, array in arrays.items():
            start = self._starts[name]
            end = start + len(array)
            numbers[start:end] = array
            if end > start:
                last = (end - 1) // BLOCK
                for block in range(start // BLOCK, last):
                    used[block] = BLOCK
                used[last] = max(used[last], end - last * BLOCK)
        row[: self._blocks] = used

    def fetch(self) -> None:
        """Bring to the device what is loaded for the replay that comes to this."""
        fetch_turn(self._host, self._flat, self._fetched)

    def sent(self) -> None:
        """A replay was asked for: the next one fetches from the other memory."""
        if (sent := self._sent[self._turn]) is not None:
            sent.record()
        self._turn = 1 - self._turn

    def unsent(self) -> None:
        """What was fetched last was for no replay."""
        self._fetched -= self._blocks
