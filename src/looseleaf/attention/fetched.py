"""Int32 arrays that graphs fetch themselves."""

from collections.abc import Mapping

import torch

from looseleaf.attention.lists import IntArray, places, views
from looseleaf.ops.fetch_numbers import fetch_numbers


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
