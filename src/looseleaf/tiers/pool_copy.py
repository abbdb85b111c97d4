"""Between the pages of the device pool and the bytes of records, layer by layer.

On a GPU all copies are on a stream of their own, so they run beside the model's kernels; an event
says when a layer is there. On a CPU they are plain copies, by numpy: a second thread in PyTorch's
would start threads that get in the way of the model's."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.tiers.base import Record
from looseleaf.tiers.files import dtype_name
from looseleaf.tiers.strided import MOST_PITCH, Rows, copy_to_device, runtime_copy

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PoolCopy:
    """Copies for one pool. `write_layers` may be called by one thread a record, `read` by the
    engine's only."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        layers, _, _, *page = map(int, pool.kv.shape)
        self._shape, self._dtype = (layers, *page), dtype_name(pool.kv.dtype)
        # as words: numpy has no bfloat16
        self._kv = pool.kv.view(_WORDS[pool.kv.itemsize])
        # bytes from K to V, and from there to the K of the next layer
        self._plane = pool.num_pages * pool.kv[0, 0, 0].numel() * pool.kv.itemsize
        self._arrays: npt.NDArray[np.generic] | None = None
        self._stream: torch.cuda.Stream | None = None
        if pool.kv.is_cuda:
            # PyTorch hands out the same few streams again and again, for each priority others: one
            # of usual priority may be that in which the engine's thread captures a graph just then
            self._stream = torch.cuda.Stream(pool.kv.device, priority=-1)
        else:
            self._arrays = self._kv.numpy()

    @property
    def on_gpu(self) -> bool:
        return self._stream is not None

    def record(self, key: SegmentKey, length: int, num_pages: int, tenant: str = "") -> Record:
        """The record of a segment in this pool."""
        layers, heads, page_size, dim = self._shape
        shape = 2, num_pages, heads, page_size, dim
        size = num_pages * self.pool.bytes_per_page // layers
        return Record(key, length, layers, shape, self._dtype, size, tenant)

    def fence(self) -> torch.cuda.Event | None:
        """On a GPU, when all that was launched so far has been computed: what was read from pages
        that are another's now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._kv.device))
        return event

    def write_layers(
        self,
        first: int,
        pages: Sequence[int],
        content: UInt8[Tensor, "layers layer_bytes"],
        behind: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Copy layers from ``first`` on into ``pages`` once ``behind`` has come; on a GPU the event
        says when they are there, and until then ``content`` must stay as it is."""
        count, run = len(content), self.run_of(pages)
        if run is not None and content.is_pinned():
            # as if the layers before stood before them
            begins = content.data_ptr() - first * content[0].numel()
            fences = [] if behind is None else [behind]
            return self.write_runs(range(first, first + count), [(run, begins)], fences)
        shape = (count, 2, len(pages), *self._kv.shape[3:])
        words, index = content.reshape(-1).view(self._kv.dtype).view(shape), _index(pages)
        if self._stream is None:
            assert self._arrays is not None
            for n in range(count):
                self._arrays[first + n][:, index] = words[n].numpy()
            return None
        with torch.cuda.device(self._kv.device), torch.cuda.stream(self._stream):
            if behind is not None:
                self._stream.wait_event(behind)
            layers = self._kv[first : first + count]
            if isinstance(index, slice):
                # a run of pages is a run of memory in every layer: no kernel has to do anything
                targets = layers[:, :, index].flatten(0, 1).unbind(0)
                for target, source in zip(targets, words.flatten(0, 1).unbind(0), strict=True):
                    target.copy_(source, non_blocking=True)
            else:
                numbers = torch.tensor(index).pin_memory().to(layers.device, non_blocking=True)
                layers.index_copy_(2, numbers, words.to(layers.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def run_of(self, pages: Sequence[int]) -> range | None:
        """``pages`` if they are neighbours, rising, and the pool is a GPU's that takes copies of
        runs; else None."""
        if self._stream is None or runtime_copy() is None or self._plane > MOST_PITCH:
            return None
        run = range(pages[0], pages[0] + len(pages))
        return run if list(pages) == list(run) else None

    def write_runs(
        self,
        layers: range,
        sources: Sequence[tuple[range, int]],
        behind: Sequence[torch.cuda.Event],
    ) -> torch.cuda.Event:
        """Copy ``layers`` of several segments into the runs of pages that `run_of` gave, each from
        the address at which its first layer lies, once all of ``behind`` have come. The event says
        when they are there."""
        assert self._stream is not None
        device = self._kv.device
        if torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)
        for event in behind:
            self._stream.wait_event(event)
        target = self._kv.data_ptr() + layers.start * 2 * self._plane
        page = self._plane // self.pool.num_pages
        for run, source in sources:
            width = len(run) * page
            copy_to_device(
                Rows(target + run.start * page, self._plane),
                Rows(source + layers.start * 2 * width, width),
                width,
                2 * len(layers),
                self._stream.cuda_stream,
            )
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def read(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> torch.cuda.Event | None:
        """Copy all layers of a segment out of ``pages``; on a GPU what is on its way there comes
        first, and the event says when the bytes are."""
        words = into.view(self._kv.dtype).view(record.num_layers, *record.layer_shape)
        behind = record.length % self.pool.page_size
        if self._stream is None:
            assert self._arrays is not None
            target, index = words.numpy(), _index(pages)
            for layer in range(record.num_layers):
                target[layer] = self._arrays[layer][:, index]
            if behind:
                target[:, :, -1, :, behind:] = 0
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(self._stream):
            numbers = torch.tensor(pages, device=self._kv.device)
            for layer in range(record.num_layers):
                taken = self._kv[layer].index_select(1, numbers)
                if behind:
                    taken[:, -1, :, behind:] = 0
                words[layer].copy_(taken, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


def _index(pages: Sequence[int]) -> slice | list[int]:
    """``pages`` as numpy takes them fastest."""
    first, count = pages[0], len(pages)
    if list(pages) == list(range(first, first + count)):
        return slice(first, first + count)
    return list(pages)
