"""Who asks for copies from pinned memory to a GPU's pages: a thread in C.

A copy costs its asking, some microseconds, and Python's lock: while a thread of Python asks for the
copies of a request, none can plan its step. So an `Order` is handed over in one call, and
`copy_engine.c` asks for its parcels. What is packed (`looseleaf.ops.packed_pages`) goes through a
ring of memory on the device: bytes are copied as they are on one stream and unpacked on another, so
one hides behind the other. Of a link that gives 50 GB/s and a memory that gives 4,000 the unpacking
takes little."""

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
from looseleaf.tiers.transfer.copy_batches import Parcels

if TYPE_CHECKING:
    from looseleaf.ops.packed_pages.kernel import Unpacker

ALIGNMENT = 512
"""At what bytes stretches of a ring begin."""

# what is asked for at once is half of it
_RING_BYTES = 160 << 20
_STRETCHES = 64
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
"""Addresses of the calls that `copy_engine.c` makes of a device."""
_Document = _structure(
    "_Document", first_page=_LONG, num_pages=_LONG, address=_POINTER, packed=_INT, wanted=_INT
)
_Order = _structure(
    "_Order", documents=_POINTER, parcels=_POINTER, events=_POINTER, fence=_POINTER,
    num_parcels=_LONG, at_once=_LONG, ahead=_LONG, asked=_LONG, failed=_LONG, ended=_LONG,
    bytes=_LONG, passed=_LONG, come=_LONG, needed=_LONG,
    fenced=_LONG, next=_POINTER,
)  # fmt: skip
_Stretch = _structure("_Stretch", begin=_LONG, end=_LONG, event=_POINTER)
_Given = _structure(
    "_Given", calls=Calls, device=_LONG, copies=_POINTER, unpacking=_POINTER, pages=_POINTER,
    page=_LONG, plane=_LONG, pool_pages=_LONG, ring=_POINTER, ring_bytes=_LONG, packed_page=_LONG,
    alignment=_LONG, kernel=_POINTER, blocks=_LONG, threads=_LONG, shared=_LONG, ready=_POINTER,
    stretches=_POINTER, num_stretches=_LONG,
)  # fmt: skip


class Source(NamedTuple):
    """A document that is to be written to a run of pages: the pinned address at which its first
    layer lies, and whether it is packed."""

    pages: range
    address: int
    packed: bool


class Handle(NamedTuple):
    """A compiled kernel as the driver knows it; bytes of shared memory."""

    function: int
    threads: int
    shared: int


@dataclass(frozen=True)
class Device:
    """What a courier has of a device: its ``calls`` and its ``number``, two streams by their
    handles, what makes events, which have one from the start, and, where pages can be packed,
    the memory that packed bytes pass through, and the kernel that unpacks. ``owners`` are what the
    handles belong to."""

    calls: ctypes.Structure
    number: int
    copies: int
    unpacking: int
    make_event: Callable[[], torch.cuda.Event]
    ring: Tensor | None = None
    kernel: Handle | None = None
    owners: tuple[Any, ...] = ()


class Courier:
    """The thread of one pool; it ends with this object."""

    def __init__(self, pool: PagePool, device: Device) -> None:
        """Raises NativeUnavailable without a C compiler, or if the system gives no thread."""
        source = (
            resources.files("looseleaf.tiers.transfer")
            .joinpath("copy_engine.c")
            .read_text(encoding="utf-8")
        )
        library = load_library(source, ())
        library.looseleaf_courier_bytes.restype = _LONG
        library.looseleaf_begin_courier.argtypes = [_POINTER, _POINTER]
        library.looseleaf_await.argtypes = [_POINTER, _POINTER, _LONG, _LONG, _LONG]
        library.looseleaf_order.argtypes = library.looseleaf_drop.argtypes = [_POINTER, _POINTER]
        self.library, self.device = library, device
        self._spare: list[torch.cuda.Event] = []
        # the thread looks at them
        self._open: set[Order] = set()
        self._lock = threading.Lock()
        given, needed = _given(pool, device)
        # whoever waits when it ends still looks at it
        self._memory = ctypes.create_string_buffer(library.looseleaf_courier_bytes())
        self.pointer = ctypes.addressof(self._memory)
        if not library.looseleaf_begin_courier(self.pointer, ctypes.addressof(given)):
            raise NativeUnavailable("no thread for copies to a GPU: end other programs")
        end, thread = library.looseleaf_end_courier, _POINTER(self.pointer)
        # what it writes to must be there as long as the thread
        kept = self._memory, pool, device, needed
        self._end = weakref.finalize(self, lambda _: end(thread), kept)

    def end(self) -> None:
        """End the thread; what is not asked for yet never is."""
        self._end()

    def order(
        self, sources: Sequence[Source], parcels: Parcels, fence: torch.cuda.Event | None
    ) -> "Order":
        """Have documents brought, once ``fence`` has come."""
        order = Order(self, sources, parcels, fence)
        with self._lock:
            self._open.add(order)
        order.begin()
        return order

    def events(self, count: int) -> list[torch.cuda.Event]:
        """Events that nobody else has until they are given back: to make one takes longer than to
        ask for a copy."""
        with self._lock:
            taken, self._spare = self._spare[:count], self._spare[count:]
        return taken + [self.device.make_event() for _ in range(count - len(taken))]

    def close(self, order: "Order", events: Sequence[torch.cuda.Event]) -> None:
        """All of an order is there, and its events are free."""
        with self._lock:
            self._open.discard(order)
            self._spare += events


class Order:
    """Documents on their way, by their numbers. Any thread may ask."""

    def __init__(
        self,
        courier: Courier,
        sources: Sequence[Source],
        parcels: Parcels,
        fence: torch.cuda.Event | None,
    ) -> None:
        self._courier, self.parcels, self._fence = courier, parcels, fence
        self._documents = (_Document * len(sources))(
            *(_Document(s.pages.start, len(s.pages), s.address, s.packed, True) for s in sources)
        )
        count = len(parcels.every)
        self._events = courier.events(count)
        handles = (ctypes.c_void_p * count)(*(event.cuda_event for event in self._events))
        portions = parcels.portions
        self._order: Any = _Order(
            documents=ctypes.addressof(self._documents),
            parcels=parcels.array.ctypes.data,
            events=ctypes.addressof(handles),
            fence=None if fence is None else fence.cuda_event,
            num_parcels=count,
            at_once=portions.at_once,
            ahead=portions.ahead,
            needed=-1,
        )
        self._handles, self._address = handles, ctypes.addressof(self._order)
        self._over = False

    def begin(self) -> None:
        """Hand it over; `Courier.order` does so."""
        courier = self._courier
        courier.library.looseleaf_order(courier.pointer, self._address)

    @property
    def ended(self) -> bool:
        """Whether all of it was asked for, or it has failed."""
        return bool(self._order.ended)

    @property
    def failed(self) -> bool:
        """Whether the device refused some of it, or the courier is gone."""
        return bool(self._order.failed)

    @property
    def error(self) -> RuntimeError:
        """What to say if it `failed`."""
        return RuntimeError(f"documents were not copied to the GPU: error {self._order.failed}")

    @property
    def num_bytes(self) -> int:
        """Bytes asked for so far of what was wanted."""
        return int(self._order.bytes)

    def num_layers(self, document: int) -> int:
        """How many layers of a document were asked for."""
        asked = self.parcels.every[: self._order.asked]
        return sum(len(layers) for layers, documents in asked if document in documents)

    def event(self, document: int, layer: int) -> torch.cuda.Event | None:
        """When a layer that was asked for is there, -1 for the last one so far; None for now."""
        if self._over:
            return None
        if layer >= 0:
            return self._events[self.parcels.numbers[document, layer]]
        asked = int(self._order.asked)
        return self._events[asked - 1] if asked else None

    def wait(self, document: int, layer: int, seconds: float) -> bool:
        """Wait until a layer is asked for, or no more is, for that long at most; whether it is."""
        parcel = self.parcels.numbers[document, layer]
        return bool(self._order.asked > parcel) or self._await(parcel, layer, seconds)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until all of it was asked for, or it has failed, for that long at most; whether it
        has."""
        return self.ended or self._await(self._order.num_parcels - 1, -1, seconds) or self.ended

    def drop(self, document: int) -> None:
        """Ask for no more of a document."""
        library, size = self._courier.library, ctypes.sizeof(_Document)
        address = ctypes.addressof(self._documents) + document * size
        library.looseleaf_drop(self._courier.pointer, address)

    def close(self) -> None:
        """All that was asked for is there."""
        assert self.ended, "what is under way can't be closed"
        if not self._over:
            self._over = True
            self._courier.close(self, self._events)

    def _await(self, parcel: int, layer: int, seconds: float) -> bool:
        courier, nanoseconds = self._courier, int(1e9 * seconds)
        wait = courier.library.looseleaf_await
        return bool(wait(courier.pointer, self._address, parcel, layer, nanoseconds))


def make_ring(unpacker: "Unpacker") -> Tensor:
    """Memory for packed bytes on their way to a pool."""
    size = -(-min(_RING_BYTES, unpacker.pool_bytes) // ALIGNMENT) * ALIGNMENT
    return torch.empty(size, dtype=torch.uint8, device=unpacker.device)


def cuda_device(
    device: torch.device, copies: torch.cuda.Stream, unpacker: "Unpacker | None"
) -> Device | None:
    """The GPU of a pool, whose bytes come on the stream ``copies``, and what unpacks its pages;
    None where the runtime that PyTorch has loaded is not to be found."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        runtime, driver = ctypes.CDLL(f"libcudart.so.{major}"), ctypes.CDLL("libcuda.so.1")
        every = [getattr(runtime, name) for name in _CALLS]
        calls = Calls(*(ctypes.cast(c, _POINTER) for c in (*every, driver.cuLaunchKernel)))
    except (OSError, AttributeError) as error:
        _log.warning("documents come to the GPU in more copies, and more slowly: %s", error)
        return None
    unpacking = torch.cuda.Stream(device, priority=-1)

    def make_event() -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(copies)
        return event

    return Device(
        calls,
        copies.device.index,
        copies.cuda_stream,
        unpacking.cuda_stream,
        make_event,
        None if unpacker is None else make_ring(unpacker),
        None if unpacker is None else Handle(*unpacker.handle),
        (copies, unpacking, runtime, driver, unpacker),
    )


def _given(pool: PagePool, device: Device) -> tuple[ctypes.Structure, tuple[Any, ...]]:
    """What a thread is begun with, and what must be there as long as it is."""
    page = pool.kv[0, 0, 0].numel() * pool.kv.itemsize
    ready, ends = device.make_event(), [device.make_event() for _ in range(_STRETCHES)]
    stretches = (_Stretch * _STRETCHES)(*(_Stretch(0, 0, event.cuda_event) for event in ends))
    blocks, kernel = blocks_of(pool.kv), device.kernel or Handle(0, 0, 0)
    given = _Given(
        calls=device.calls,
        device=device.number,
        copies=device.copies,
        unpacking=device.unpacking,
        pages=pool.kv.data_ptr(),
        page=page,
        plane=pool.num_pages * page,
        pool_pages=pool.num_pages,
        ring=None if device.ring is None else device.ring.data_ptr(),
        ring_bytes=0 if device.ring is None else device.ring.numel(),
        packed_page=blocks * BLOCK_BYTES,
        alignment=ALIGNMENT,
        kernel=kernel.function,
        blocks=blocks,
        threads=kernel.threads,
        shared=kernel.shared,
        ready=ready.cuda_event,
        stretches=ctypes.addressof(stretches),
        num_stretches=_STRETCHES,
    )
    return given, (ready, ends, stretches)
