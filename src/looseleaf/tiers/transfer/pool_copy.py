"""Between the pages of the device pool and the bytes of records, layer by layer.

On a GPU all copies are on a stream of their own, so they run beside the model's kernels; an event
says when a layer is there. On a CPU they are plain copies, by numpy: a second thread in PyTorch's
would start threads that get in the way of the model's.

Records may be packed (`looseleaf.ops.packed_pages`): three quarters of the bytes over a link and in
every tier, for a kernel on each way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from looseleaf.config import TierPacking
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.ops.packed_pages import (
    BLOCK,
    BLOCK_BYTES,
    blocks_of,
    pack_pages,
    unpack_pages,
)
from looseleaf.tiers.stores.base import Record
from looseleaf.tiers.stores.files import dtype_name
from looseleaf.tiers.transfer.copy_engine import Courier, cuda_device
from looseleaf.tiers.transfer.packed_copy import PackedCopy
from looseleaf.tiers.transfer.strided import MOST_PITCH, Rows, copy_to_device

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# of a record that is packed so much is on the device at a time
_PACKED_AT_ONCE = 32 << 20


@dataclass(frozen=True)
class Copied:
    """A segment that is being copied out of its pages, which must stay until it ``is_out``: on a
    GPU ``event`` says when that is, and ``spilled`` then whether it could not be packed, in memory
    of the host."""

    event: torch.cuda.Event | None = None
    spilled: Int[Tensor, " 1"] | None = None

    @property
    def is_out(self) -> bool:
        """Whether it is copied: its pages may be used for something else, if it is `whole`."""
        return self.event is None or bool(self.event.query())

    @property
    def whole(self) -> bool:
        """Whether what came out is the segment; to be asked when it is out. If not, it could not be
        packed, and is to be copied as it is."""
        return self.spilled is None or not int(self.spilled)

    def wait(self) -> None:
        """Return when it is out."""
        if self.event is not None:
            self.event.synchronize()


class PoolCopy:
    """Copies for one pool. `write_layers` may be called by one thread a record, `read` by the
    engine's only. What comes from pinned memory to runs of a GPU's pages its ``courier`` brings."""

    def __init__(self, pool: PagePool, packing: TierPacking = "off") -> None:
        """Raises InvalidOption if packing is to be on, and this pool's pages can't be packed."""
        self.pool = pool
        self._blocks = blocks_of(pool.kv)
        if packing == "on" and not self._blocks:
            raise InvalidOption(
                "tier_packing='on' needs a cache of bfloat16 whose pages are a multiple of "
                f"{BLOCK:,} numbers a layer, and this one has {pool.kv[0, 0, 0].numel():,} of "
                f"{pool.kv.dtype}: use auto"
            )
        self.packs = bool(self._blocks) and (packing == "on" or (packing == "auto" and self.on_gpu))
        layers, _, _, *page = map(int, pool.kv.shape)
        self._shape, self._dtype = (layers, *page), dtype_name(pool.kv.dtype)
        # as words: numpy has no bfloat16
        self._kv = pool.kv.view(_WORDS[pool.kv.itemsize])
        # bytes from K to V, and from there to the K of the next layer
        self._plane = pool.num_pages * pool.kv[0, 0, 0].numel() * pool.kv.itemsize
        self._arrays: npt.NDArray[np.generic] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._packed: PackedCopy | None = None
        self.courier: Courier | None = None
        if pool.kv.is_cuda:
            # PyTorch hands out the same few streams again and again, for each priority others: one
            # of usual priority may be that in which the engine's thread captures a graph just then
            self._stream = torch.cuda.Stream(pool.kv.device, priority=-1)
            unpacker = None
            if self._blocks:
                from looseleaf.ops.packed_pages.kernel import Unpacker

                # what others packed is read here too, whether or not this pool packs
                unpacker = Unpacker(pool.kv)
                self._packed = PackedCopy(unpacker, self._stream)
            if self.packs:
                self._warm()
            device = cuda_device(pool.kv.device, self._stream, unpacker)
            self.courier = None if device is None else Courier(pool, device)
        else:
            self._arrays = self._kv.numpy()

    def _warm(self) -> None:
        """Have the kernel that packs compiled before a request waits for it."""
        kv = self.pool.kv
        room = torch.empty(1, 2, self._blocks, BLOCK_BYTES, dtype=torch.uint8, device=kv.device)
        spilled = torch.zeros(1, dtype=torch.int32, device=kv.device)
        pack_pages(kv[:1], torch.zeros(1, dtype=torch.int64, device=kv.device), 1, room, spilled)

    @property
    def on_gpu(self) -> bool:
        return self.pool.kv.is_cuda

    def record(
        self,
        key: SegmentKey,
        length: int,
        num_pages: int,
        tenant: str = "",
        *,
        packed: bool = True,
    ) -> Record:
        """The record of a segment in this pool: packed if that is wanted here and it can be."""
        layers, heads, page_size, dim = self._shape
        shape = 2, num_pages, heads, page_size, dim
        packed = packed and self._can_pack(num_pages)
        size = self.layer_bytes(num_pages, packed=packed)
        return Record(key, length, layers, shape, self._dtype, size, tenant, packed)

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of the record of so many pages."""
        return self._shape[0] * self.layer_bytes(num_pages, packed=self._can_pack(num_pages))

    def layer_bytes(self, num_pages: int, *, packed: bool) -> int:
        """Bytes of a layer of so many pages, 0 if they can't be packed and are to be."""
        if packed:
            return 2 * num_pages * self._blocks * BLOCK_BYTES
        return num_pages * self.pool.bytes_per_page // self._shape[0]

    def _can_pack(self, num_pages: int) -> bool:
        return self.packs and (self._packed is None or self._packed.fits(num_pages))

    def fence(self) -> torch.cuda.Event | None:
        """On a GPU, when all that was launched so far has been computed: what was read from pages
        that are another's now. None if it has."""
        if self._stream is None:
            return None
        computing = torch.cuda.current_stream(self._kv.device)
        if computing.query():
            return None
        event = torch.cuda.Event()
        event.record(computing)
        return event

    def write_layers(
        self,
        record: Record,
        first: int,
        pages: Sequence[int],
        content: UInt8[Tensor, "layers layer_bytes"],
        behind: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Copy layers of a record from ``first`` on into ``pages`` once ``behind`` has come; on a
        GPU the event says when they are there, and until then ``content`` must stay as it is."""
        count, run = len(content), self.run_of(pages)
        if record.packed and self._packed is not None:
            return self._packed.write(first, pages, content, behind)
        if record.packed:
            blocks = content.view(count, 2, -1, BLOCK_BYTES)
            unpack_pages(blocks, torch.tensor(pages), first, self.pool.kv)
            return None
        if run is not None and content.is_pinned():
            return self._write_run(first, run, content, behind)
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

    def run_of(self, pages: Sequence[int], *, packed: bool = False) -> range | None:
        """``pages`` if they are neighbours, rising, and the pool has a courier that brings them;
        else None."""
        if self.courier is None:
            return None
        # from one layer to the next, unless they are laid out anew
        if self._plane > MOST_PITCH and not packed:
            return None
        run = range(pages[0], pages[0] + len(pages))
        return run if list(pages) == list(run) else None

    def _write_run(
        self,
        first: int,
        run: range,
        content: UInt8[Tensor, "layers layer_bytes"],
        behind: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """`write_layers` of what is pinned and not packed: one copy."""
        assert self._stream is not None
        if torch.cuda.current_device() != self._kv.device.index:
            torch.cuda.set_device(self._kv.device)
        if behind is not None:
            self._stream.wait_event(behind)
        page = self._plane // self.pool.num_pages
        width, planes = len(run) * page, 2 * len(content)
        target = self._kv.data_ptr() + 2 * first * self._plane + run.start * page
        source = Rows(content.data_ptr(), width)
        stream = self._stream.cuda_stream
        copy_to_device(Rows(target, self._plane), source, width, planes, stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def read(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> Copied:
        """Copy all layers of a segment out of ``pages``; on a GPU what is on its way there comes
        first. One that is packed may turn out not to be `Copied.whole`."""
        if self._stream is None:
            take = self._pack if record.packed else self._take
            return take(record, pages, into)
        self._stream.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(self._stream):
            if record.packed:
                copied = self._pack(record, pages, into)
            else:
                copied = self._take_from_gpu(record, pages, into)
            event = torch.cuda.Event()
            event.record(self._stream)
        return replace(copied, event=event)

    def _pack(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> Copied:
        kv = self.pool.kv
        numbers = torch.tensor(pages, device=kv.device)
        spilled = torch.zeros(1, dtype=torch.int32, device=kv.device)
        told = torch.zeros(1, dtype=torch.int32, pin_memory=self.on_gpu)
        together = max(1, _PACKED_AT_ONCE // record.layer_bytes)
        shape = 2, len(pages) * self._blocks, BLOCK_BYTES
        for first in range(0, record.num_layers, together):
            some, room = kv[first : first + together], into[first : first + together]
            packed = torch.empty((len(some), *shape), dtype=torch.uint8, device=kv.device)
            pack_pages(some, numbers, record.length, packed, spilled)
            room.copy_(packed.view(room.shape), non_blocking=True)
        told.copy_(spilled, non_blocking=True)
        return Copied(spilled=told)

    def _take(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> Copied:
        assert self._arrays is not None
        words = into.view(self._kv.dtype).view(record.num_layers, *record.layer_shape)
        target, index = words.numpy(), _index(pages)
        for layer in range(record.num_layers):
            target[layer] = self._arrays[layer][:, index]
        if behind := record.length % self.pool.page_size:
            target[:, :, -1, :, behind:] = 0
        return Copied()

    def _take_from_gpu(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> Copied:
        words = into.view(self._kv.dtype).view(record.num_layers, *record.layer_shape)
        behind = record.length % self.pool.page_size
        numbers = torch.tensor(pages, device=self._kv.device)
        for layer in range(record.num_layers):
            taken = self._kv[layer].index_select(1, numbers)
            if behind:
                taken[:, -1, :, behind:] = 0
            words[layer].copy_(taken, non_blocking=True)
        return Copied()


def _index(pages: Sequence[int]) -> slice | list[int]:
    """``pages`` as numpy takes them fastest."""
    first, count = pages[0], len(pages)
    if list(pages) == list(range(first, first + count)):
        return slice(first, first + count)
    return list(pages)
