"""Loads from the host's memory by copies that are asked for: by whoever waits for a layer, and by
the thread that loads once it is woken. The device is played by events that come when told to."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import config

from looseleaf.kv.pool import PagePool
from looseleaf.tiers.arena import Arena
from looseleaf.tiers.base import TierCounters
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.host import HostTier
from looseleaf.tiers.ledger import Ledger
from looseleaf.tiers.load import LoadFailed
from looseleaf.tiers.loader import Loader
from looseleaf.tiers.pool_copy import PoolCopy, Source
from tests.tiers.records import key

LAYERS, DOCUMENTS, PAGES = 12, 3, 6


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """Events that are played reach the library."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


class Played:
    """When a copy is there."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def synchronize(self) -> None:
        assert self.come.wait(30)

    def query(self) -> bool:
        return self.come.is_set()


class PlayedCopies(PoolCopy):
    """Copies that are made when they are asked for, and come as ``free`` says: at once, or by the
    test."""

    on_gpu = True  # type: ignore[assignment]

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self.free, self.asked = True, list[tuple[range, str, Played]]()
        self.sent: list[tuple[int, int]] = []
        self.broken = False

    def fence(self) -> None:
        return None

    def run_of(self, pages: Sequence[int], *, packed: bool = False) -> range | None:
        run = range(pages[0], pages[0] + len(pages))
        return run if list(pages) == list(run) else None

    def write_from(self, layers: range, sources: Sequence[Source], behind: Any) -> Any:
        assert not behind
        if self.broken:
            raise RuntimeError("no copy today")
        size = 2 * PAGES * self.pool.kv[0, 0, 0].numel() * self.pool.kv.itemsize
        for pages, address, _ in sources:
            raw = (ctypes.c_ubyte * (len(layers) * size)).from_address(
                address + layers.start * size
            )
            content = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
            record = self.record(key(0), 16 * PAGES, PAGES)
            self.write_layers(record, layers.start, pages, content.view(len(layers), size))
        self.sent += [(layer, source.pages.start) for source in sources for layer in layers]
        event = Played()
        if self.free:
            event.come.set()
        self.asked.append((layers, threading.current_thread().name, event))
        return event


class Scene:
    """A tier with documents in it, and a pool in which they are to be."""

    def __init__(self) -> None:
        self.pool = PagePool(
            num_pages=18, page_size=16, num_layers=LAYERS, num_kv_heads=2, head_dim=2048,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.pool.kv.normal_(generator=torch.Generator().manual_seed(3))
        self.before = self.pool.kv.clone()
        self.copy = PlayedCopies(self.pool)
        self.host = HostTier(Ledger(1 << 29))
        self.records = [self.copy.record(key(n), 16 * PAGES, PAGES) for n in range(DOCUMENTS)]
        for number, record in enumerate(self.records):
            slot = self.host.reserve(record)
            assert slot is not None
            self.copy.read(record, self.pages(number), slot.layers)
            kept = self.host.keep(slot)
            assert kept is not None
            kept.close()
        self.pool.kv.zero_()
        self.observed: list[tuple[Any, ...]] = []
        self.loader = Loader(
            Guard(self.host, TierCounters()), self.copy, Arena(1 << 20, pinned=False), self.host,
            5.0, lambda *seen: self.observed.append(seen),
        )  # fmt: skip

    def pages(self, number: int) -> list[int]:
        return list(range(PAGES * number, PAGES * (number + 1)))

    def begin(self, apart: bool = False) -> list[Any]:
        wanted = [(r, self.pages(n)) for n, r in enumerate(self.records)]
        if apart:
            wanted[1][1].reverse()
        return self.loader.begin(wanted)

    def end(self) -> None:
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


def test_only_the_first_layers_are_asked_for_before_the_thread_wakes(scene: Scene) -> None:
    loads = scene.begin()
    asked = [layers for layers, _, _ in scene.copy.asked]
    assert asked[0].start == 0 and 0 < sum(map(len, asked)) < LAYERS
    assert {name for _, name, _ in scene.copy.asked} == {threading.current_thread().name}
    assert not scene.loader._queues[0].qsize()
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    assert [load.state for load in loads] == ["done"] * DOCUMENTS and scene.arrived()


def test_whoever_waits_for_a_layer_asks_for_it_himself(scene: Scene) -> None:
    loads = scene.begin()
    # nobody woke a thread, and no copy has come
    for layer in range(LAYERS):
        for load in loads:
            assert load.sent_by(layer) is not None
    assert sum(len(layers) for layers, _, _ in scene.copy.asked) >= LAYERS
    assert {name for _, name, _ in scene.copy.asked} == {threading.current_thread().name}
    assert scene.arrived()
    # the thread has nothing left to do but to count
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    scene.end()
    assert scene.loader.guard.counters.loads == DOCUMENTS
    assert scene.loader.guard.counters.bytes_read == sum(r.num_bytes for r in scene.records)


def test_a_document_in_scattered_pages_comes_though_nobody_wakes_the_thread(scene: Scene) -> None:
    loads = scene.begin(apart=True)
    for layer in range(LAYERS):
        for load in loads:
            load.sent_by(layer)
    kv, back = scene.pool.kv, scene.pages(1)[::-1]
    assert torch.equal(kv[:, :, back], scene.before[:, :, scene.pages(1)])
    assert torch.equal(kv[:, :, scene.pages(2)], scene.before[:, :, scene.pages(2)])


def test_a_thread_that_is_alone_waits_for_copies_before_it_asks_for_more(scene: Scene) -> None:
    scene.copy.free = False
    loads = scene.begin()
    scene.loader.wake()
    told = 0
    # once all layers are asked for, nothing is asked for that was not counted
    while not all(load._layers == LAYERS for load in loads) or told < len(scene.copy.asked):
        # at any time what was asked for at once is the most that has not come
        open_ones = [e for _, _, e in scene.copy.asked if not e.come.is_set()]
        assert len(open_ones) <= 3
        if told < len(scene.copy.asked):
            scene.copy.asked[told][2].come.set()
            told += 1
    assert all(load.wait_for_end(30) for load in loads) and scene.arrived()


def test_threads_that_wait_and_load_together_send_every_layer_once(scene: Scene) -> None:
    for _ in range(5):
        scene.copy.sent.clear()
        scene.pool.kv.zero_()
        loads = scene.begin()
        scene.loader.wake()
        for layer in range(LAYERS):
            for load in loads:
                load.sent_by(layer)
        assert all(load.wait_for_end(30) for load in loads) and scene.arrived()
        every = [(layer, scene.pages(n)[0]) for layer in range(LAYERS) for n in range(DOCUMENTS)]
        assert sorted(scene.copy.sent) == every


def test_a_copy_that_is_refused_fails_its_loads_and_no_other(scene: Scene) -> None:
    loads = scene.begin()
    scene.copy.broken = True
    with pytest.raises(LoadFailed):
        loads[0].sent_by(LAYERS - 1)
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in loads)
    assert {load.state for load in loads} == {"failed"}
    scene.copy.broken = False
    again = scene.begin()
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in again)
    assert {load.state for load in again} == {"done"} and scene.arrived()


def test_what_is_cancelled_is_not_written_any_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: computing)
    loads = scene.begin()
    loads[1].cancel()
    for layer in range(LAYERS):
        loads[0].sent_by(layer)
    scene.loader.wake()
    assert all(load.wait_for_end(30) for load in (loads[0], loads[2]))
    assert [load.state for load in loads] == ["done", "cancelled", "done"]
    kv, first = scene.pool.kv, scene.pages(1)
    assert (kv[-1][:, first] == 0).all() and (kv[0][:, first] != 0).any()
    for number in (0, 2):
        pages = scene.pages(number)
        assert torch.equal(kv[:, :, pages], scene.before[:, :, pages])
