"""Copies between pages of the device pool and the bytes of records, layer by layer.

On a GPU all copies run on a stream of their own, beside the model's kernels, and events mark
arrivals. On a CPU numpy copies, because PyTorch's threads would compete with the model's.

Packed records (`looseleaf.ops.packed_pages`) take about three quarters of the bytes, for one kernel
in each direction."""

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
from looseleaf.tiers.transfer.copy_engine import CopyEngine, cuda_device
from looseleaf.tiers.transfer.packed_copy import PackedCopy
from looseleaf.tiers.transfer.strided import MOST_PITCH, Rows, copy_to_device

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# device buffer of one packing step
_PACKED_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class PageExport:
    """A copy of a segment out of its pages, which must stay until it `is_finished`.

    On a GPU ``event`` marks the end, and ``spilled`` (host memory) then tells whether packing
    failed."""

    event: torch.cuda.Event | None = None
    spilled: Int[Tensor, " 1"] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the copy has ended. Pages may be reused if it also `is_valid`."""
        return self.event is None or bool(self.event.query())

    @property
    def is_valid(self) -> bool:
        """Whether a finished copy holds the segment. Otherwise packing failed, and the segment has
        to be copied unpacked."""
        return self.spilled is None or not int(self.spilled)

    def wait(self) -> None:
        """Waits for the end of the copy."""
        if self.event is not None:
            self.event.synchronize()


class PoolCopy:
    """Copies of one pool.

    One thread per record may call `write_layers`; only the engine's thread may call `read`.
    ``copy_engine`` copies pinned memory to page runs of a GPU."""

    def __init__(self, pool: PagePool, packing: TierPacking = "off") -> None:
        """Raises InvalidOption if packing is on and this pool's pages can't be packed."""
        self.pool = pool
        self._blocks = blocks_of(pool.kv)
        if packing == "on" and not self._blocks:
            raise InvalidOption(
                "tier_packing='on' needs a cache of bfloat16 whose pages are a multiple of "
                f"{BLOCK:,} numbers a layer, and this one has {pool.kv[0, 0, 0].numel():,} of "
                f"{pool.kv.dtype}: use auto"
            )
        self.packs = bool(self._blocks) and (packing == "on" or (packing == "auto" and self.on_gpu))
        layers, self._planes, _, *page = map(int, pool.kv.shape)
        self._shape, self._dtype = (layers, *page), dtype_name(pool.kv.dtype)
        # integer words, because numpy has no bfloat16
        self._kv = pool.kv.view(_WORDS[pool.kv.itemsize])
        # bytes from K to V, and from V to the next layer's K
        self._plane = pool.num_pages * pool.kv[0, 0, 0].numel() * pool.kv.itemsize
        self._arrays: npt.NDArray[np.generic] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._packed: PackedCopy | None = None
        self.copy_engine: CopyEngine | None = None
        if pool.kv.is_cuda:
            # PyTorch reuses few streams per priority; one of normal priority may be the engine's
            # capture stream
            self._stream = torch.cuda.Stream(pool.kv.device, priority=-1)
            unpacker = None
            if self._blocks:
                from looseleaf.ops.packed_pages.kernel import Unpacker

                # records may be packed even if this pool packs none
                unpacker = Unpacker(pool.kv)
                self._packed = PackedCopy(unpacker, self._stream)
            if self.packs:
                self._compile_packing()
            device = cuda_device(pool.kv.device, self._stream, unpacker)
            self.copy_engine = None if device is None else CopyEngine(pool, device)
        else:
            self._arrays = self._kv.numpy()

    def _compile_packing(self) -> None:
        """Compiles the packing kernel before a request waits for it."""
        kv = self.pool.kv
        target = torch.empty(
            1, self._planes, self._blocks, BLOCK_BYTES, dtype=torch.uint8, device=kv.device
        )
        spilled = torch.zeros(1, dtype=torch.int32, device=kv.device)
        pack_pages(kv[:1], torch.zeros(1, dtype=torch.int64, device=kv.device), 1, target, spilled)

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
        """The record of a segment in this pool, packed if requested and possible."""
        layers, heads, page_size, dim = self._shape
        shape = self._planes, num_pages, heads, page_size, dim
        packed = packed and self._can_pack(num_pages)
        size = self.layer_bytes(num_pages, packed=packed)
        return Record(key, length, layers, shape, self._dtype, size, tenant, packed)

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of a record of ``num_pages`` pages."""
        return self._shape[0] * self.layer_bytes(num_pages, packed=self._can_pack(num_pages))

    def layer_bytes(self, num_pages: int, *, packed: bool) -> int:
        """Bytes of a layer of ``num_pages`` pages; 0 if packed and this pool can't be packed."""
        if packed:
            return self._planes * num_pages * self._blocks * BLOCK_BYTES
        return num_pages * self.pool.bytes_per_page // self._shape[0]

    def _can_pack(self, num_pages: int) -> bool:
        return self.packs and (self._packed is None or self._packed.fits(num_pages))

    def fence(self) -> torch.cuda.Event | None:
        """On a GPU, an event after all kernels so far, which may still read reused pages. None if
        they have finished."""
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
        fence: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event | None:
        """Copies layers of a record from ``first`` on into ``pages``, after ``fence``.

        On a GPU returns the arrival event; ``content`` must not change before it."""
        count, run = len(content), self.run_of(pages)
        if record.packed and self._packed is not None:
            return self._packed.write(first, pages, content, fence)
        if record.packed:
            blocks = content.view(count, self._planes, -1, BLOCK_BYTES)
            unpack_pages(blocks, torch.tensor(pages), first, self.pool.kv)
            return None
        if run is not None and content.is_pinned():
            return self._write_run(first, run, content, fence)
        shape = (count, self._planes, len(pages), *self._kv.shape[3:])
        words, index = content.reshape(-1).view(self._kv.dtype).view(shape), _index(pages)
        if self._stream is None:
            assert self._arrays is not None
            for n in range(count):
                self._arrays[first + n][:, index] = words[n].numpy()
            return None
        with torch.cuda.device(self._kv.device), torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            layers = self._kv[first : first + count]
            if isinstance(index, slice):
                # a page run is contiguous in every layer, so no kernel is needed
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
        """``pages`` as a range if they are consecutive and the copy engine can write them, else
        None."""
        if self.copy_engine is None:
            return None
        # the pitch between layers; packed layers are written by a kernel
        if self._plane > MOST_PITCH and not packed:
            return None
        run = range(pages[0], pages[0] + len(pages))
        return run if list(pages) == list(run) else None

    def _write_run(
        self,
        first: int,
        run: range,
        content: UInt8[Tensor, "layers layer_bytes"],
        fence: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        """`write_layers` for pinned, unpacked content: one copy."""
        assert self._stream is not None
        if torch.cuda.current_device() != self._kv.device.index:
            torch.cuda.set_device(self._kv.device)
        if fence is not None:
            self._stream.wait_event(fence)
        page = self._plane // self.pool.num_pages
        width, planes = len(run) * page, self._planes * len(content)
        target = self._kv.data_ptr() + self._planes * first * self._plane + run.start * page
        source = Rows(content.data_ptr(), width)
        stream = self._stream.cuda_stream
        copy_to_device(Rows(target, self._plane), source, width, planes, stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def read(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> PageExport:
        """Copies all layers of a segment out of ``pages``, after writes in flight.

        A packed export may turn out not to be `PageExport.is_valid`."""
        if self._stream is None:
            if record.packed:
                return self._pack(record, pages, into)
            return self._gather(record, pages, into)
        self._stream.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(self._stream):
            if record.packed:
                export = self._pack(record, pages, into)
            else:
                export = self._gather_on_gpu(record, pages, into)
            event = torch.cuda.Event()
            event.record(self._stream)
        return replace(export, event=event)

    def _pack(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> PageExport:
        kv = self.pool.kv
        numbers = torch.tensor(pages, device=kv.device)
        spilled = torch.zeros(1, dtype=torch.int32, device=kv.device)
        host_flag = torch.zeros(1, dtype=torch.int32, pin_memory=self.on_gpu)
        chunk = max(1, _PACKED_CHUNK_BYTES // record.layer_bytes)
        shape = self._planes, len(pages) * self._blocks, BLOCK_BYTES
        for first in range(0, record.num_layers, chunk):
            layers, target = kv[first : first + chunk], into[first : first + chunk]
            packed = torch.empty((len(layers), *shape), dtype=torch.uint8, device=kv.device)
            pack_pages(layers, numbers, record.length, packed, spilled)
            target.copy_(packed.view(target.shape), non_blocking=True)
        host_flag.copy_(spilled, non_blocking=True)
        return PageExport(spilled=host_flag)

    def _gather(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> PageExport:
        assert self._arrays is not None
        words = into.view(self._kv.dtype).view(record.num_layers, *record.layer_shape)
        target, index = words.numpy(), _index(pages)
        for layer in range(record.num_layers):
            target[layer] = self._arrays[layer][:, index]
        if tail := record.length % self.pool.page_size:
            target[:, :, -1, :, tail:] = 0
        return PageExport()

    def _gather_on_gpu(
        self, record: Record, pages: Sequence[int], into: UInt8[Tensor, "layers layer_bytes"]
    ) -> PageExport:
        words = into.view(self._kv.dtype).view(record.num_layers, *record.layer_shape)
        tail = record.length % self.pool.page_size
        numbers = torch.tensor(pages, device=self._kv.device)
        for layer in range(record.num_layers):
            plane = self._kv[layer].index_select(1, numbers)
            if tail:
                plane[:, -1, :, tail:] = 0
            words[layer].copy_(plane, non_blocking=True)
        return PageExport()


def _index(pages: Sequence[int]) -> slice | list[int]:
    """``pages`` in the form that numpy indexes fastest."""
    first, count = pages[0], len(pages)
    if list(pages) == list(range(first, first + count)):
        return slice(first, first + count)
    return list(pages)
