"""An allocator of host memory that is reserved once, and pinned where a GPU reads it.

Pinning takes tens of milliseconds for any size, so no load pins memory."""

import threading

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.errors import InvalidOption

# GPU copies are fastest at this alignment, and every dtype is valid there
ALIGNMENT = 512


class Arena:
    """``num_bytes`` of host memory with first-fit allocation. Thread-safe.

    Raises InvalidOption if the machine has less memory."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise InvalidOption(
                f"this machine does not give {num_bytes / 2**30:,.1f} GiB for documents outside "
                "the pool: lower host_gib or staging_gib",
                "host_gib",
                "staging_gib",
            ) from error
        self.memory: UInt8[Tensor, " num_bytes"] = memory
        self._lock = threading.Lock()
        # sizes by start offset
        self._holes: dict[int, int] = {0: num_bytes} if num_bytes else {}
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes of all holes."""
        with self._lock:
            return sum(self._holes.values())

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Start and size of each hole, unordered."""
        with self._lock:
            return list(self._holes.items())

    def allocate(self, num_bytes: int) -> UInt8[Tensor, " num_bytes"] | None:
        """A run of ``num_bytes`` bytes; None if no hole is large enough."""
        size = aligned(num_bytes)
        with self._lock:
            for start in sorted(self._holes):
                if self._holes[start] >= size:
                    remaining = self._holes.pop(start) - size
                    if remaining:
                        self._holes[start + size] = remaining
                    self._taken[start] = size
                    return self.memory[start : start + num_bytes]
        return None

    def free(self, run: UInt8[Tensor, " bytes"]) -> None:
        """Frees a run of `allocate`; adjacent holes merge."""
        start = int(run.storage_offset())
        with self._lock:
            size = self._taken.pop(start)
            next_size = self._holes.pop(start + size, 0)
            previous = next((s for s, n in self._holes.items() if s + n == start), None)
            if previous is None:
                self._holes[start] = size + next_size
            else:
                self._holes[previous] += size + next_size


def aligned(num_bytes: int) -> int:
    """Size of the run that holds ``num_bytes``."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
