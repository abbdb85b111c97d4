"""Loads from the host's memory by copies that a courier asks for; the device is played."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import config

from looseleaf.kv.pool import PagePool
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.stores.base import TierCounters
from looseleaf.tiers.stores.host import HostTier
from looseleaf.tiers.stores.ledger import Ledger
from looseleaf.tiers.transfer.copy_engine import CopyEngine
from looseleaf.tiers.transfer.load import LoadFailed
from looseleaf.tiers.transfer.loader import Loader
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.tiers.played import PlayedGPU
from tests.tiers.records import key

LAYERS, DOCUMENTS, PAGES = 12, 3, 6


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Events that are played reach the library."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


class PlayedCopies(PoolCopy):
    """Between a pool and records, with a courier of a GPU that is played."""

    on_gpu = True  # type: ignore[assignment]

    def __init__(self, pool: PagePool, gpu: PlayedGPU) -> None:
        super().__init__(pool)
        self.copy_engine = CopyEngine(pool, gpu.device())

    def fence(self) -> None:
        return None


class Scene:
    """A tier with documents in it, and a pool in which they are to be."""

    def __init__(self) -> None:
        self.pool = PagePool(
            num_pages=18, page_size=16, num_layers=LAYERS, num_kv_heads=2, head_dim=2048,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        # as it lies on a GPU
        self.pool.kv = torch.randn(self.pool.kv.shape, generator=torch.Generator().manual_seed(3))
        self.before = self.pool.kv.clone()
        self.gpu = PlayedGPU(self.pool)
        self.gpu.free = True
        self.copy = PlayedCopies(self.pool, self.gpu)
        self.host = HostTier(Ledger(1 << 29))
        self.records = [self.copy.record(key(n), 16 * PAGES, PAGES) for n in range(DOCUMENTS)]
        for number, record in enumerate(self.records):
            slot = self.host.reserve(record)
            assert slot is not None
            self.copy.read(record, self.pages(number), slot.layers)
            kept = self.host.commit(slot)
            assert kept is not None
            kept.close()
        self.pool.kv.zero_()
        self.observed, self.seen = list[tuple[Any, ...]](), threading.Condition()
        self.loader = Loader(
            Guard(self.host, TierCounters()), self.copy, Arena(1 << 20, pinned=False), self.host,
            5.0, self._observe,
        )  # fmt: skip

    def _observe(self, *seen: Any) -> None:
        with self.seen:
            self.observed.append(seen)
            self.seen.notify_all()

    def pages(self, number: int) -> list[int]:
        return list(range(PAGES * number, PAGES * (number + 1)))

    def begin(self, apart: bool = False) -> list[Any]:
        wanted = [(r, self.pages(n)) for n, r in enumerate(self.records)]
        if apart:
            wanted[1][1].reverse()
        return self.loader.begin(wanted)

    def let_go(self) -> None:
        """The device does what it has, and from now on all at once."""
        with self.gpu.lock:
            self.gpu.free = True
            while self.gpu.step():
                pass

    def settle(self, num_loads: int) -> None:
        """The loader has counted so many times."""
        with self.seen:
            assert self.seen.wait_for(lambda: len(self.observed) == num_loads, 30)

    def end(self) -> None:
        self.let_go()
        self.loader.close()
        for thread in self.loader.threads:
            thread.join(10)
            assert not thread.is_alive()

    def arrived(self) -> bool:
        used = PAGES * DOCUMENTS
        return torch.equal(self.pool.kv[:, :, :used], self.before[:, :, :used])


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.end()


def test_what_a_step_can_begin_with_is_asked_for_by_no_thread_of_python(scene: Scene) -> None:
    scene.gpu.free = False
    loads = scene.begin()
    assert all(load.sent_by(0) is not None for load in loads)
    assert not scene.loader._queues[0].qsize()
    with scene.gpu.lock:
        # it looks whether any has come, and asks for no more
        seen = scene.gpu.queries
        assert scene.gpu.moved.wait_for(lambda: scene.gpu.queries > seen + 3, 30)
    assert 0 < loads[0]._layers < LAYERS
    assert threading.current_thread().name not in {name for name, _ in scene.gpu.asked}
    assert [load.state for load in loads] == ["loading"] * DOCUMENTS
    scene.let_go()
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    assert [load.state for load in loads] == ["done"] * DOCUMENTS and scene.arrived()


def test_whoever_waits_for_a_layer_has_it_asked_for_whatever_has_come(scene: Scene) -> None:
    scene.gpu.free = False
    loads = scene.begin()
    events = [load.sent_by(layer) for layer in range(LAYERS) for load in loads]
    assert not any(event is None or event.query() for event in events)
    scene.let_go()
    assert all(event is not None and event.query() for event in events) and scene.arrived()
    # the thread has nothing left to do but to count
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    scene.end()
    assert scene.loader.guard.counters.loads == DOCUMENTS
    assert scene.loader.guard.counters.bytes_read == sum(r.num_bytes for r in scene.records)
    assert sum(size for _, size in scene.gpu.asked) == sum(r.num_bytes for r in scene.records)


def test_a_document_in_scattered_pages_comes_though_nobody_wakes_the_thread(scene: Scene) -> None:
    loads = scene.begin(apart=True)
    for layer in range(LAYERS):
        for load in loads:
            load.sent_by(layer)
    kv, back = scene.pool.kv, scene.pages(1)[::-1]
    assert torch.equal(kv[:, :, back], scene.before[:, :, scene.pages(1)])
    assert torch.equal(kv[:, :, scene.pages(2)], scene.before[:, :, scene.pages(2)])


def test_events_are_used_again_when_what_they_told_of_is_there(scene: Scene) -> None:
    copy_engine = scene.copy.copy_engine
    assert copy_engine is not None
    for turn in range(4):
        scene.pool.kv.zero_()
        loads = scene.begin()
        scene.loader.wake()
        for layer in range(LAYERS):
            for load in loads:
                load.sent_by(layer)
        assert all(load.wait_for_end(30) for load in loads) and scene.arrived()
        scene.settle(turn + 1)
        # nothing is to be waited for any more
        assert all(load.sent_by(0) is None for load in loads)
        if not turn:
            spare = set(copy_engine._free_events)
    assert set(copy_engine._free_events) == spare and not copy_engine._running


def test_a_copy_that_is_refused_fails_its_loads_and_no_other(scene: Scene) -> None:
    scene.gpu.broken = True
    loads = scene.begin()
    with pytest.raises(LoadFailed):
        loads[0].sent_by(LAYERS - 1)
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    assert {load.state for load in loads} == {"failed"}
    scene.gpu.broken = False
    again = scene.begin()
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in again)
    assert {load.state for load in again} == {"done"} and scene.arrived()
    assert scene.loader.guard.counters.faults


def test_what_is_cancelled_is_not_written_any_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: computing)
    scene.gpu.free = False
    loads = scene.begin()
    assert loads[1].sent_by(0) is not None
    loads[1].cancel()
    for layer in range(LAYERS):
        loads[0].sent_by(layer)
    scene.let_go()
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in (loads[0], loads[2]))
    assert [load.state for load in loads] == ["done", "cancelled", "done"]
    kv, first = scene.pool.kv, scene.pages(1)
    assert (kv[-1][:, first] == 0).all() and (kv[0][:, first] != 0).any()
    for number in (0, 2):
        pages = scene.pages(number)
        assert torch.equal(kv[:, :, pages], scene.before[:, :, pages])


def test_a_device_that_does_nothing_fails_a_load_in_its_time_and_keeps_no_thread(
    scene: Scene,
) -> None:
    scene.gpu.free = False
    loads = scene.begin()
    assert loads[0].sent_by(0) is not None
    scene.loader.wake()
    # layers that nobody waits for are not asked for, and the loader is told to end
    closing = threading.Thread(target=scene.loader.close)
    closing.start()
    with scene.gpu.lock:
        assert scene.gpu.moved.wait_for(lambda: all(x._state == "failed" for x in loads), 30)
    scene.let_go()
    closing.join(10)
    assert not closing.is_alive() and not scene.arrived()
