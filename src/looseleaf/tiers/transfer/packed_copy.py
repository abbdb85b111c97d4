"""Copies packed records from any host memory into scattered pages of a GPU, and unpacks them there.

Records pass through a ring buffer on the device. A copy into a region of the ring waits until the
region's previous content is unpacked. `CopyEngine` has a ring of its own."""

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
    """Copies of packed records into a GPU's pool. Thread-safe."""

    def __init__(self, unpacker: "Unpacker", copy_stream: torch.cuda.Stream) -> None:
        """Bytes arrive on ``copy_stream``; pages are written on a stream of this object."""
        self._copy_stream, self._unpacker = copy_stream, unpacker
        self._unpack_stream = torch.cuda.Stream(copy_stream.device, priority=-1)
        self._ring = make_ring(unpacker)
        self._next = 0
        self._regions: deque[tuple[range, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def fits(self, num_pages: int) -> bool:
        """Whether a layer of ``num_pages`` pages fits the ring; longer ones are stored unpacked."""
        return 4 * num_pages * self._unpacker.page_bytes <= len(self._ring)

    def write(
        self,
        first: int,
        pages: Sequence[int],
        content: UInt8[Tensor, "layers layer_bytes"],
        fence: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """Writes layers from ``first`` on into ``pages`` after ``fence``; returns their event."""
        copied, unpacked = torch.cuda.Event(), torch.cuda.Event()
        # the kernel launches on the stream's device, not on this thread's current one
        with self._lock, torch.cuda.stream(self._unpack_stream):
            numbers = torch.tensor(pages, dtype=torch.int32).pin_memory()
            numbers = numbers.to(self._ring.device, non_blocking=True)
            region = self._allocate(content.numel())
            buffer = self._ring[region.start : region.start + content.numel()]
            with torch.cuda.stream(self._copy_stream):
                buffer.copy_(content.reshape(-1), non_blocking=True)
            copied.record(self._copy_stream)
            for event in (copied, fence):
                if event is not None:
                    self._unpack_stream.wait_event(event)
            self._unpacker.launch(
                buffer.data_ptr(),
                numbers.data_ptr(),
                len(pages),
                first,
                len(content),
                self._unpack_stream.cuda_stream,
            )
            unpacked.record(self._unpack_stream)
            self._regions.append((region, unpacked))
        return unpacked

    def _allocate(self, size: int) -> range:
        """A region of the ring that the copy stream may write to."""
        start = self._next if self._next + size <= len(self._ring) else 0
        region = range(start, start + -(-size // ALIGNMENT) * ALIGNMENT)
        assert region.stop <= len(self._ring), "a layer larger than the ring must not be packed"
        while self._regions and self._regions[0][1].query():
            self._regions.popleft()
        for other, event in self._regions:
            if other.start < region.stop and region.start < other.stop:
                self._copy_stream.wait_event(event)
        self._next = region.stop
        return region
