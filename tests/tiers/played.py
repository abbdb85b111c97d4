"""A GPU that is played: two streams whose copies and kernels are made when the test says so, in any
order that streams and events allow."""

import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from looseleaf.kv.pool import PagePool
from looseleaf.ops.packed_pages import BLOCK_BYTES, blocks_of
from looseleaf.ops.packed_pages.reference import unpack_pages_reference
from looseleaf.tiers.transfer.copy_engine import Calls, Device, KernelHandle

COPIES, UNPACKING = 1, 2
_NOT_READY, _REFUSED = 600, 2
_P, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES = {
    "set_device": (_I,),
    "copy": (_P, _S, _P, _S, _S, _S, _I, _P),
    "record": (_P, _P),
    "wait": (_P, _P, ctypes.c_uint),
    "query": (_P,),
    "launch": (_P, *[ctypes.c_uint] * 7, _P, ctypes.POINTER(_P), _P),
}


class PlayedEvent:
    """An event by its handle."""

    def __init__(self, gpu: "PlayedGPU", handle: int) -> None:
        self.gpu, self.cuda_event = gpu, handle

    def query(self) -> bool:
        return self.gpu.has_come(self.cuda_event)

    def synchronize(self) -> None:
        with self.gpu.lock:
            assert self.gpu.moved.wait_for(self.query, 30), "the test never lets it come"


class PlayedGPU:
    """``asked`` are copies so far: the thread that asked, and the bytes. While it is ``free`` all
    is done as soon as it is asked for; otherwise `step` does it. While it is ``broken`` no copy is
    taken. ``on_event`` hears of events that come."""

    def __init__(self, pool: PagePool, ring_bytes: int = 0) -> None:
        self.pool, self.lock = pool, threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.free = self.broken = False
        self.asked: list[tuple[str, int]] = []
        self.queries = 0
        self.on_event: Callable[[int], None] = lambda handle: None
        self._streams: dict[int, deque[Any]] = {COPIES: deque(), UNPACKING: deque()}
        self._recorded: dict[int, int] = {}
        self._come: dict[int, int] = {}
        self._handles = itertools.count(100)
        self._ring = torch.full((ring_bytes,), 7, dtype=torch.uint8) if ring_bytes else None
        self._made = [
            ctypes.CFUNCTYPE(_I, *types)(getattr(self, f"_{name}"))
            for name, types in _SIGNATURES.items()
        ]

    def device(self) -> Device:
        calls = Calls(*(ctypes.cast(call, _P) for call in self._made))
        kernel = KernelHandle(9, 128, 64) if self._ring is not None else None
        event: Any = self.make_event
        return Device(calls, 3, COPIES, UNPACKING, event, self._ring, kernel, (self,))

    def make_event(self) -> PlayedEvent:
        handle = next(self._handles)
        self._recorded[handle] = self._come[handle] = 0
        return PlayedEvent(self, handle)

    def has_come(self, handle: int) -> bool:
        with self.lock:
            return self._come[handle] >= self._recorded[handle]

    def step(self, choose: random.Random | None = None) -> bool:
        """Do one thing that a stream has before it; False if there is none that can be done."""
        with self.lock:
            ready = [number for number, stream in self._streams.items() if self._is_ready(stream)]
            if not ready:
                return False
            stream = self._streams[choose.choice(ready) if choose else ready[0]]
            name, *about = stream.popleft()
            if name == "do":
                about[0]()
            elif name == "record":
                handle, version = about
                self._come[handle] = version
                self.on_event(handle)
            self.moved.notify_all()
            return True

    def _is_ready(self, stream: Sequence[Any]) -> bool:
        if not stream:
            return False
        name, *about = stream[0]
        return name != "wait" or self._come[about[0]] >= about[1]

    def _put(self, stream: int, *operation: Any) -> int:
        with self.lock:
            self._streams[stream].append(operation)
            while self.free and self.step():
                pass
            self.moved.notify_all()
        return 0

    def _set_device(self, number: int) -> int:
        return 0 if number == 3 else _REFUSED

    def _copy(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int,
        kind: int, stream: int,
    ) -> int:  # fmt: skip
        if self.broken or kind != 1:
            return _REFUSED

        def do() -> None:
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)

        self.asked.append((threading.current_thread().name, width * height))
        return self._put(stream, "do", do)

    def _record(self, event: int, stream: int) -> int:
        with self.lock:
            self._recorded[event] += 1
            return self._put(stream, "record", event, self._recorded[event])

    def _wait(self, stream: int, event: int, flags: int) -> int:
        with self.lock:
            return self._put(stream, "wait", event, self._recorded[event])

    def _query(self, event: int) -> int:
        with self.lock:
            self.queries += 1
            self.moved.notify_all()
            return 0 if self.has_come(event) else _NOT_READY

    def _launch(self, kernel: int, *about: Any) -> int:
        x, y, z, *block, shared, stream, arguments, _ = about
        if (kernel, z, block, shared) != (9, 1, [128, 1, 1], 64):
            return _REFUSED
        packed, words, listed, kv = (
            ctypes.cast(arguments[n], ctypes.POINTER(_P))[0] for n in range(4)
        )
        first_page, first_plane, pool_pages = (
            ctypes.cast(arguments[n], ctypes.POINTER(ctypes.c_int32))[0] for n in (4, 5, 6)
        )
        if (words, listed) != (packed, packed) or pool_pages != self.pool.num_pages:
            return _REFUSED
        if kv != self.pool.kv.data_ptr():
            return _REFUSED
        pages = range(first_page, first_page + x // blocks_of(self.pool.kv))
        planes = self.pool.kv.shape[1]

        def do() -> None:
            raw = (ctypes.c_ubyte * (x * y * BLOCK_BYTES)).from_address(packed)
            blocks = torch.frombuffer(raw, dtype=torch.uint8).view(-1, planes, x, BLOCK_BYTES)
            layer = first_plane // planes
            unpack_pages_reference(blocks, torch.tensor(list(pages)), layer, self.pool.kv)

        return self._put(stream, "do", do)
