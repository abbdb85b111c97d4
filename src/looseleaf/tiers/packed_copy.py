"""Packed records on their way into a GPU's pages: copied as they are, and unpacked there.

Records pass through a ring of memory on the device. What is copied into a stretch of it waits until
what stood there before is unpacked; copies and unpacking have a stream each, so one hides behind
the other. Of a link that gives 50 GB/s and a memory that gives 4,000 the unpacking takes little."""

import threading
from collections import deque
from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.pool import PagePool
from looseleaf.ops.packed_pages import BLOCK_BYTES, blocks_of
from looseleaf.tiers.strided import Rows, copy_to_device

# what is asked for at once is half of it
_RING_BYTES = 160 << 20
_ALIGNMENT = 512


class PackedCopy:
    """Copies of packed records into a GPU's pool. May be called from several threads."""

    def __init__(self, pool: PagePool, copies: torch.cuda.Stream) -> None:
        """``copies`` is the stream on which bytes come; pages are written on one of its own."""
        from looseleaf.ops.packed_pages.kernel import Unpacker

        device = pool.kv.device
        self._copies, self._stream = copies, torch.cuda.Stream(device, priority=-1)
        # of K or V of a page
        self._page = blocks_of(pool.kv) * BLOCK_BYTES
        whole = 2 * len(pool.kv) * pool.num_pages * self._page
        size = -(-min(_RING_BYTES, whole) // _ALIGNMENT) * _ALIGNMENT
        self._ring = torch.empty(size, dtype=torch.uint8, device=device)
        # compiled before anybody waits
        self._unpacker = Unpacker(pool.kv)
        self._next = 0
        self._used: deque[tuple[range, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def fits(self, num_pages: int) -> bool:
        """Whether a layer of so many pages finds room; what is longer is kept as it is."""
        return 4 * num_pages * self._page <= len(self._ring)

    def write(
        self,
        layers: range,
        sources: Sequence[tuple[range, int]],
        behind: Sequence[torch.cuda.Event],
    ) -> torch.cuda.Event:
        """Bring ``layers`` of documents into their runs of pages, each from the pinned address at
        which its first layer lies, once all of ``behind`` have come. The event says when they are
        there."""
        event, planes = None, 2 * len(layers)
        for some in self._together(sources, planes):
            pages = range(some[0][0].start, some[-1][0].stop)
            pitch = len(pages) * self._page
            with self._lock:
                taken = self._take(planes * pitch)
                at = self._ring.data_ptr() + taken.start
                for run, address in some:
                    width = len(run) * self._page
                    source = Rows(address + 2 * layers.start * width, width)
                    target = Rows(at + (run.start - pages.start) * self._page, pitch)
                    copy_to_device(target, source, width, planes, self._copies.cuda_stream)
                event = self._unpack(taken, pages, len(pages), layers, behind)
        assert event is not None
        return event

    def write_one(
        self,
        first: int,
        pages: Sequence[int],
        content: UInt8[Tensor, "layers layer_bytes"],
        behind: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """Bring layers of one document from ``first`` on into any ``pages``, as `write` does, from
        anywhere on the host."""
        layers, fences = range(first, first + len(content)), [] if behind is None else [behind]
        # the device of the stream is the one to launch on, whatever this thread's is
        with self._lock, torch.cuda.stream(self._stream):
            numbers = torch.tensor(pages, dtype=torch.int32).pin_memory()
            numbers = numbers.to(self._ring.device, non_blocking=True)
            taken = self._take(content.numel())
            with torch.cuda.stream(self._copies):
                room = self._ring[taken.start : taken.start + content.numel()]
                room.copy_(content.reshape(-1), non_blocking=True)
            return self._unpack(taken, numbers.data_ptr(), len(pages), layers, fences)

    def _together(
        self, sources: Sequence[tuple[range, int]], planes: int
    ) -> list[list[tuple[range, int]]]:
        """Documents whose pages are one run, and which find room together."""
        groups: list[list[tuple[range, int]]] = []
        for run, address in sorted(sources, key=lambda source: source[0].start):
            first = groups[-1][0][0].start if groups else 0
            fits = 2 * planes * (run.stop - first) * self._page <= len(self._ring)
            if groups and groups[-1][-1][0].stop == run.start and fits:
                groups[-1].append((run, address))
            else:
                groups.append([(run, address)])
        return groups

    def _unpack(
        self,
        taken: range,
        pages: range | int,
        num_pages: int,
        layers: range,
        behind: Sequence[torch.cuda.Event],
    ) -> torch.cuda.Event:
        """Have what is copied to a stretch of the ring written to its pages."""
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record(self._copies)
        for event in (ready, *behind):
            self._stream.wait_event(event)
        at, stream = self._ring.data_ptr() + taken.start, self._stream.cuda_stream
        self._unpacker.launch(at, pages, num_pages, layers, stream)
        done.record(self._stream)
        self._used.append((taken, done))
        return done

    def _take(self, size: int) -> range:
        """A stretch of the ring into which the stream of copies may write from now on."""
        begin = self._next if self._next + size <= len(self._ring) else 0
        taken = range(begin, begin + -(-size // _ALIGNMENT) * _ALIGNMENT)
        assert taken.stop <= len(self._ring), "a layer that finds no room was to be kept as it is"
        while self._used and self._used[0][1].query():
            self._used.popleft()
        for used, event in self._used:
            if used.start < taken.stop and taken.start < used.stop:
                self._copies.wait_event(event)
        self._next = taken.stop
        return taken
