"""Submits copies from pinned host memory to GPU pages on a thread in C.

A Python thread would hold the interpreter for each submission and so delay the planning of a step.
Here `CopyEngine.submit` passes a whole `Transfer` in one call; `copy_engine.c` submits its batches.
Packed bytes (`looseleaf.ops.packed_pages`) pass through a ring buffer on the device. The copy
stream fills it and the unpack stream empties it, so copies and unpacking overlap."""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from looseleaf.errors import NativeUnavailable
from looseleaf.kv.pool import PagePool
from looseleaf.ops.native.native_build import load_library
from looseleaf.ops.packed_pages import BLOCK_BYTES, blocks_of
from looseleaf.tiers.transfer.copy_batches import CopySchedule

if TYPE_CHECKING:
    from looseleaf.ops.packed_pages.kernel import Unpacker

ALIGNMENT = 512
"""Alignment of ring regions in bytes."""

# twice the immediate bytes of a schedule
_RING_BYTES = 160 << 20
_NUM_REGIONS = 64
_CALLS = (
    "cudaSetDevice",
    "cudaMemcpy2DAsync",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaEventQuery",
)
_log = logging.getLogger(__name__)


def _structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
Calls = _structure(
    "Calls", **dict.fromkeys(("set_device", "copy", "record", "wait", "query", "launch"), _POINTER)
)
"""Addresses of the device functions that `copy_engine.c` calls."""
_Document = _structure(
    "_Document", first_page=_LONG, num_pages=_LONG, address=_POINTER, packed=_INT, active=_INT
)
_Transfer = _structure(
    "_Transfer", documents=_POINTER, batches=_POINTER, events=_POINTER, fence=_POINTER,
    num_batches=_LONG, immediate=_LONG, in_flight=_LONG, submitted=_LONG, error=_LONG,
    finished=_LONG, active_bytes=_LONG, all_bytes=_LONG, arrived=_LONG, needed_layer=_LONG,
    fenced=_LONG, next=_POINTER,
)  # fmt: skip
_Region = _structure("_Region", start=_LONG, end=_LONG, event=_POINTER)
_Setup = _structure(
    "_Setup", calls=Calls, device=_LONG, copy_stream=_POINTER, unpack_stream=_POINTER,
    pages=_POINTER, page=_LONG, plane=_LONG, planes=_LONG, pool_pages=_LONG,
    ring=_POINTER, ring_bytes=_LONG, packed_page=_LONG, alignment=_LONG, kernel=_POINTER,
    blocks=_LONG, threads=_LONG, shared=_LONG, copied=_POINTER, regions=_POINTER, num_regions=_LONG,
)  # fmt: skip


class Source(NamedTuple):
    """A document in pinned memory: its target pages, its address, and whether it is packed."""

    pages: range
    address: int
    packed: bool


class KernelHandle(NamedTuple):
    """A compiled kernel: driver function, threads per block, bytes of shared memory."""

    function: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Device:
    """The device of a copy engine: functions, number, and two streams by their handles.

    ``make_event`` returns recorded events. ``ring`` and ``kernel`` are set where pages can be
    packed. ``owners`` keeps the objects of the handles alive."""

    calls: ctypes.Structure
    number: int
    copy_stream: int
    unpack_stream: int
    make_event: Callable[[], torch.cuda.Event]
    ring: Tensor | None = None
    kernel: KernelHandle | None = None
    owners: tuple[Any, ...] = ()


class CopyEngine:
    """The copy thread of one pool; it ends with this object."""

    def __init__(self, pool: PagePool, device: Device) -> None:
        """Raises NativeUnavailable without a C compiler, or if no thread can be started."""
        source = (
            resources.files("looseleaf.tiers.transfer")
            .joinpath("copy_engine.c")
            .read_text(encoding="utf-8")
        )
        library = load_library(source, ())
        library.looseleaf_copy_engine_bytes.restype = _LONG
        library.looseleaf_start_copy_engine.argtypes = [_POINTER, _POINTER]
        library.looseleaf_await.argtypes = [_POINTER, _POINTER, _LONG, _LONG, _LONG]
        library.looseleaf_submit.argtypes = library.looseleaf_drop.argtypes = [_POINTER, _POINTER]
        self.library, self.device = library, device
        self._free_events: list[torch.cuda.Event] = []
        # the C thread reads them
        self._running: set[Transfer] = set()
        self._lock = threading.Lock()
        setup, buffers = _make_setup(pool, device)
        # waiting threads may still read it after the end
        self._memory = ctypes.create_string_buffer(library.looseleaf_copy_engine_bytes())
        self.pointer = ctypes.addressof(self._memory)
        if not library.looseleaf_start_copy_engine(self.pointer, ctypes.addressof(setup)):
            raise NativeUnavailable("no thread for copies to a GPU: end other programs")
        end, thread = library.looseleaf_end_copy_engine, _POINTER(self.pointer)
        # the thread writes to these until it ends
        targets = self._memory, pool, device, buffers
        self._end = weakref.finalize(self, lambda _: end(thread), targets)

    def end(self) -> None:
        """Ends the thread; transfers that are not finished fail."""
        self._end()

    def submit(
        self, sources: Sequence[Source], schedule: CopySchedule, fence: torch.cuda.Event | None
    ) -> "Transfer":
        """Starts a transfer that writes to pages only after ``fence``."""
        transfer = Transfer(self, sources, schedule, fence)
        with self._lock:
            self._running.add(transfer)
        transfer.start()
        return transfer

    def events(self, count: int) -> list[torch.cuda.Event]:
        """Events for one transfer; `close` recycles them, because creation is slow."""
        with self._lock:
            events, self._free_events = self._free_events[:count], self._free_events[count:]
        return events + [self.device.make_event() for _ in range(count - len(events))]

    def close(self, transfer: "Transfer", events: Sequence[torch.cuda.Event]) -> None:
        """Forgets a transfer that has arrived and recycles its events."""
        with self._lock:
            self._running.discard(transfer)
            self._free_events += events


class Transfer:
    """Documents in flight to a GPU, by their numbers. Thread-safe."""

    def __init__(
        self,
        engine: CopyEngine,
        sources: Sequence[Source],
        schedule: CopySchedule,
        fence: torch.cuda.Event | None,
    ) -> None:
        self._engine, self.schedule, self._fence = engine, schedule, fence
        self._documents = (_Document * len(sources))(
            *(_Document(s.pages.start, len(s.pages), s.address, s.packed, True) for s in sources)
        )
        count = len(schedule.batches)
        self._events = engine.events(count)
        self._handles = (ctypes.c_void_p * count)(*(event.cuda_event for event in self._events))
        self._state: Any = _Transfer(
            documents=ctypes.addressof(self._documents),
            batches=schedule.array.ctypes.data,
            events=ctypes.addressof(self._handles),
            fence=None if fence is None else fence.cuda_event,
            num_batches=count,
            immediate=schedule.limits.immediate,
            in_flight=schedule.limits.in_flight,
            needed_layer=-1,
        )
        self._address = ctypes.addressof(self._state)
        self._closed = False

    def start(self) -> None:
        """Passes the transfer to the C thread; `CopyEngine.submit` calls it."""
        self._engine.library.looseleaf_submit(self._engine.pointer, self._address)

    @property
    def finished(self) -> bool:
        """Whether all batches are submitted, or the transfer has failed."""
        return bool(self._state.finished)

    @property
    def failed(self) -> bool:
        """Whether the device refused a copy, or the engine has ended."""
        return bool(self._state.error)

    @property
    def error(self) -> RuntimeError:
        """The error of a `failed` transfer."""
        return RuntimeError(f"documents were not copied to the GPU: error {self._state.error}")

    @property
    def num_bytes(self) -> int:
        """Submitted bytes of documents that were not dropped."""
        return int(self._state.active_bytes)

    def num_layers(self, document: int) -> int:
        """Submitted layers of a document."""
        submitted = self.schedule.batches[: self._state.submitted]
        return sum(len(layers) for layers, documents in submitted if document in documents)

    def event(self, document: int, layer: int) -> torch.cuda.Event | None:
        """The arrival of a submitted layer, -1 for the last submitted batch; None if arrived."""
        if self._closed:
            return None
        if layer >= 0:
            return self._events[self.schedule.batch_of[document, layer]]
        submitted = int(self._state.submitted)
        return self._events[submitted - 1] if submitted else None

    def wait(self, document: int, layer: int, seconds: float) -> bool:
        """Waits up to ``seconds`` until a layer is submitted; returns whether it is."""
        batch = self.schedule.batch_of[document, layer]
        return bool(self._state.submitted > batch) or self._await(batch, layer, seconds)

    def wait_for_end(self, seconds: float) -> bool:
        """Waits up to ``seconds`` until the transfer is `finished`; returns whether it is."""
        last = self._state.num_batches - 1
        return self.finished or self._await(last, -1, seconds) or self.finished

    def drop(self, document: int) -> None:
        """Submits no more layers of a document."""
        library, size = self._engine.library, ctypes.sizeof(_Document)
        address = ctypes.addressof(self._documents) + document * size
        library.looseleaf_drop(self._engine.pointer, address)

    def close(self) -> None:
        """Recycles the events of a transfer that has arrived."""
        assert self.finished, "a running transfer can't be closed"
        if not self._closed:
            self._closed = True
            self._engine.close(self, self._events)

    def _await(self, batch: int, layer: int, seconds: float) -> bool:
        engine, nanoseconds = self._engine, int(1e9 * seconds)
        wait = engine.library.looseleaf_await
        return bool(wait(engine.pointer, self._address, batch, layer, nanoseconds))


def make_ring(unpacker: "Unpacker") -> Tensor:
    """A device buffer for packed bytes."""
    size = -(-min(_RING_BYTES, unpacker.pool_bytes) // ALIGNMENT) * ALIGNMENT
    return torch.empty(size, dtype=torch.uint8, device=unpacker.device)


def cuda_device(
    device: torch.device, copy_stream: torch.cuda.Stream, unpacker: "Unpacker | None"
) -> Device | None:
    """The GPU of a pool; None if PyTorch's CUDA runtime library can't be loaded."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        runtime, driver = ctypes.CDLL(f"libcudart.so.{major}"), ctypes.CDLL("libcuda.so.1")
        functions = [*(getattr(runtime, name) for name in _CALLS), driver.cuLaunchKernel]
        calls = Calls(*(ctypes.cast(function, _POINTER) for function in functions))
    except (OSError, AttributeError) as error:
        _log.warning("documents are copied to the GPU layer by layer, more slowly: %s", error)
        return None
    unpack_stream = torch.cuda.Stream(device, priority=-1)

    def make_event() -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(copy_stream)
        return event

    return Device(
        calls,
        copy_stream.device.index,
        copy_stream.cuda_stream,
        unpack_stream.cuda_stream,
        make_event,
        None if unpacker is None else make_ring(unpacker),
        None if unpacker is None else KernelHandle(*unpacker.handle),
        (copy_stream, unpack_stream, runtime, driver, unpacker),
    )


def _make_setup(pool: PagePool, device: Device) -> tuple[ctypes.Structure, tuple[Any, ...]]:
    """The setup of a thread, and the buffers that must outlive the thread."""
    page = pool.kv[0, 0, 0].numel() * pool.kv.itemsize
    copied, unpacked = device.make_event(), [device.make_event() for _ in range(_NUM_REGIONS)]
    regions = (_Region * _NUM_REGIONS)(*(_Region(0, 0, event.cuda_event) for event in unpacked))
    blocks, kernel = blocks_of(pool.kv), device.kernel or KernelHandle(0, 0, 0)
    setup = _Setup(
        calls=device.calls,
        device=device.number,
        copy_stream=device.copy_stream,
        unpack_stream=device.unpack_stream,
        pages=pool.kv.data_ptr(),
        page=page,
        plane=pool.num_pages * page,
        planes=pool.kv.shape[1],
        pool_pages=pool.num_pages,
        ring=None if device.ring is None else device.ring.data_ptr(),
        ring_bytes=0 if device.ring is None else device.ring.numel(),
        packed_page=blocks * BLOCK_BYTES,
        alignment=ALIGNMENT,
        kernel=kernel.function,
        blocks=blocks,
        threads=kernel.threads,
        shared=kernel.shared,
        copied=copied.cuda_event,
        regions=ctypes.addressof(regions),
        num_regions=_NUM_REGIONS,
    )
    return setup, (copied, unpacked, regions)
