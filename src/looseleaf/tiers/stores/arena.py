"""Host memory that is taken once: pinned where there is a GPU, and cut into runs of bytes.

Pinning memory takes long (tens of milliseconds, whatever the size), so it is done once and never
for a load."""

import threading

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.errors import InvalidOption

# what GPUs copy fastest from, and what any dtype may begin at
ALIGNMENT = 512


class Arena:
    """``num_bytes`` of host memory; the first hole that is large enough is taken.

    May be called from several threads. Raises InvalidOption for more than the machine gives."""

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
        # holes and what was taken, by where they begin
        self._holes: dict[int, int] = {0: num_bytes} if num_bytes else {}
        self._taken: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Bytes in all holes together."""
        with self._lock:
            return sum(self._holes.values())

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Where each hole begins, and its bytes, in no order."""
        with self._lock:
            return list(self._holes.items())

    def take(self, num_bytes: int) -> UInt8[Tensor, " num_bytes"] | None:
        """A run of that many bytes, or None if no hole is large enough."""
        size = aligned(num_bytes)
        with self._lock:
            for start in sorted(self._holes):
                if self._holes[start] >= size:
                    left = self._holes.pop(start) - size
                    if left:
                        self._holes[start + size] = left
                    self._taken[start] = size
                    return self.memory[start : start + num_bytes]
        return None

    def give(self, run: UInt8[Tensor, " bytes"]) -> None:
        """Give back a run that `take` gave; holes that meet become one."""
        start = int(run.storage_offset())
        with self._lock:
            size = self._taken.pop(start)
            behind = self._holes.pop(start + size, 0)
            before = next((s for s, n in self._holes.items() if s + n == start), None)
            if before is None:
                self._holes[start] = size + behind
            else:
                self._holes[before] += size + behind


def aligned(num_bytes: int) -> int:
    """How many bytes a run of ``num_bytes`` takes."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
