"""Packed records on their way into scattered pages of a GPU, or from memory that is not pinned:
copied as they are, and unpacked there.

Records pass through a ring of memory on the device. What is copied into a stretch of it waits until
what stood there before is unpacked. Documents that a `Courier` can bring have a ring of its own."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.transfer.copy_engine import ALIGNMENT, make_ring

if TYPE_CHECKING:
    from looseleaf.ops.packed_pages.kernel import Unpacker


class PackedCopy:
    """Copies of packed records into a GPU's pool. May be called from several threads."""

    def __init__(self, unpacker: "Unpacker", copies: torch.cuda.Stream) -> None:
        """``copies`` is the stream on which bytes come; pages are written on one of its own."""
        self._copies, self._unpacker = copies, unpacker
        self._stream = torch.cuda.Stream(copies.device, priority=-1)
        self._ring = make_ring(unpacker)
        self._next = 0
        self._used: deque[tuple[range, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def fits(self, num_pages: int) -> bool:
        """Whether a layer of so many pages finds room; what is longer is kept as it is."""
        return 4 * num_pages * self._unpacker.page_bytes <= len(self._ring)

    def write(
        self,
        first: int,
        pages: Sequence[int],
        content: UInt8[Tensor, "layers layer_bytes"],
        behind: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """Bring layers of one document from ``first`` on into any ``pages``, from anywhere on the
        host, once ``behind`` has come. The event says when they are there."""
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        # the device of the stream is the one to launch on, whatever this thread's is
        with self._lock, torch.cuda.stream(self._stream):
            numbers = torch.tensor(pages, dtype=torch.int32).pin_memory()
            numbers = numbers.to(self._ring.device, non_blocking=True)
            taken = self._take(content.numel())
            room = self._ring[taken.start : taken.start + content.numel()]
            with torch.cuda.stream(self._copies):
                room.copy_(content.reshape(-1), non_blocking=True)
            ready.record(self._copies)
            for event in (ready, behind):
                if event is not None:
                    self._stream.wait_event(event)
            at, stream = room.data_ptr(), self._stream.cuda_stream
            listed = numbers.data_ptr(), len(pages)
            self._unpacker.launch(at, *listed, first, len(content), stream)
            done.record(self._stream)
            self._used.append((taken, done))
        return done

    def _take(self, size: int) -> range:
        """A stretch of the ring into which the stream of copies may write from now on."""
        begin = self._next if self._next + size <= len(self._ring) else 0
        taken = range(begin, begin + -(-size // ALIGNMENT) * ALIGNMENT)
        assert taken.stop <= len(self._ring), "a layer that finds no room was to be kept as it is"
        while self._used and self._used[0][1].query():
            self._used.popleft()
        for used, event in self._used:
            if used.start < taken.stop and taken.start < used.stop:
                self._copies.wait_event(event)
        self._next = taken.stop
        return taken
