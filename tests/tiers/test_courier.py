"""What a courier asks a device for brings every layer of every document to its pages, and nothing
elsewhere, in whatever order the device does what it may do in any order."""

import random
import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from jaxtyping import config

from looseleaf.kv.pool import PagePool
from looseleaf.ops.packed_pages import BLOCK_BYTES, blocks_of, pack_pages
from looseleaf.tiers.transfer.copy_batches import BatchLimits, CopyBatch, CopySchedule
from looseleaf.tiers.transfer.copy_engine import CopyEngine, Source, Transfer
from tests.tiers.played import PlayedGPU

LAYERS, PAGES = 5, 24


@pytest.fixture(autouse=True, scope="module")
def unchecked() -> Iterator[None]:
    """Events that are played reach the library."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def make_pool() -> PagePool:
    made = PagePool(
        num_pages=PAGES, page_size=16, num_layers=LAYERS, num_kv_heads=2, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    # as it lies on a GPU
    made.kv = torch.randn(made.kv.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return made


def record_of(pool: PagePool, pages: range, *, packed: bool) -> torch.Tensor:
    """What a tier holds of a document that stands in ``pages``."""
    if not packed:
        return pool.kv[:, :, list(pages)].clone().contiguous()
    blocks = len(pages) * blocks_of(pool.kv)
    made = torch.empty(LAYERS, 2, blocks, BLOCK_BYTES, dtype=torch.uint8)
    spilled = torch.zeros(1, dtype=torch.int32)
    pack_pages(pool.kv, torch.tensor(list(pages)), 16 * len(pages), made, spilled)
    assert not spilled
    return made


def schedule_for(
    documents: int, most: int, choose: random.Random, limits: BatchLimits
) -> CopySchedule:
    """Any parcels that have the first layers first, of ``most`` layers of a document at most."""
    made, start = [], 0
    while start < LAYERS:
        layers = range(start, min(LAYERS, start + choose.randint(1, most)))
        first = 0
        while first < documents:
            stop = choose.randint(first + 1, documents)
            made.append(CopyBatch(layers, range(first, stop)))
            first = stop
        start = layers.stop
    return CopySchedule(limits, tuple(made))


class Scene:
    """Orders of documents in neighbouring pages and others, packed and plain."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.pool, self.stored = make_pool(), make_pool()
        self.before = self.stored.kv
        page = blocks_of(self.pool.kv) * BLOCK_BYTES
        self.most = self.choose.randint(1, 3)
        # the longest document of all layers that go together, and some more
        ring = 2 * self.most * 2 * 4 * page + self.choose.randint(0, 4 * page)
        self.gpu = PlayedGPU(self.pool, ring)
        self.copy_engine = CopyEngine(self.pool, self.gpu.device())
        self.runs: dict[Transfer, list[range]] = {}
        self.dropped: set[tuple[Transfer, int]] = set()
        self.records: list[torch.Tensor] = []
        self.targets = self._runs(18)
        self.pool.kv.zero_()

    def submit(self, count: int) -> Transfer:
        runs, self.targets = self.targets[:count], self.targets[count:]
        self.choose.shuffle(runs)
        sources = []
        for run in runs:
            packed = self.choose.random() < 0.7
            self.records.append(record_of(self.stored, run, packed=packed))
            sources.append(Source(run, self.records[-1].data_ptr(), packed))
        limits = BatchLimits(0, 0, self.choose.choice([0, 1 << 12, 1 << 30]), None, 0, 1)
        schedule = schedule_for(count, self.most, self.choose, limits)
        transfer = self.copy_engine.submit(sources, schedule, None)
        self.runs[transfer] = runs
        return transfer

    def _runs(self, pages: int) -> list[range]:
        runs, start = [], self.choose.randint(0, 2)
        while start < pages:
            stop = start + self.choose.randint(1, 4)
            runs.append(range(start, stop))
            start = stop + (self.choose.random() < 0.3)
        return runs

    def play(self, transfer: Transfer) -> None:
        """Let the device do what it has until an order has ended and come."""
        while True:
            ended = transfer.finished
            if self.gpu.step(self.choose):
                continue
            if ended:
                return
            with self.gpu.lock:
                self.gpu.moved.wait(0.001)

    def check(self) -> None:
        written = set()
        for transfer, runs in self.runs.items():
            for number, run in enumerate(runs):
                written |= set(run)
                if (transfer, number) not in self.dropped:
                    assert torch.equal(self.pool.kv[:, :, list(run)], self.before[:, :, list(run)])
        others = [page for page in range(PAGES) if page not in written]
        assert not self.pool.kv[:, :, others].any()


@pytest.mark.parametrize("before", ["dropped", "packed"])
def test_nothing_is_written_before_the_fence_whatever_the_first_parcel_is(before: str) -> None:
    scene = Scene(3)
    gpu, fence = scene.gpu, scene.gpu.make_event()
    gpu._recorded[fence.cuda_event] = 1
    runs = [range(0, 2), range(4, 6)]
    kinds = [before == "packed", False]
    records = [record_of(scene.stored, run, packed=p) for run, p in zip(runs, kinds, strict=True)]
    sources = [
        Source(run, record.data_ptr(), packed)
        for run, record, packed in zip(runs, records, kinds, strict=True)
    ]
    made = [CopyBatch(range(n, n + 1), range(d, d + 1)) for n in range(LAYERS) for d in range(2)]
    schedule = CopySchedule(BatchLimits(0, 0, 1 << 30, None, 0, 1), tuple(made))
    transfer = Transfer(scene.copy_engine, sources, schedule, fence)
    if before == "dropped":
        transfer.drop(0)
    transfer.start()
    assert transfer.wait_for_end(30) and not transfer.failed
    while gpu.step():
        pass
    assert not scene.pool.kv.any()
    with gpu.lock:
        gpu._come[fence.cuda_event] = 1
    while gpu.step():
        pass
    assert torch.equal(scene.pool.kv[:, :, 4:6], scene.before[:, :, 4:6])


@given(st.integers(0, 1 << 32), st.integers(1, 4))
def test_all_comes_to_its_pages_whatever_the_device_does_first(seed: int, count: int) -> None:
    scene = Scene(seed)
    transfers = [scene.submit(count) for _ in range(3) if len(scene.targets) >= count]
    if scene.choose.random() < 0.5:
        dropped = scene.choose.randrange(count)
        transfers[0].drop(dropped)
        scene.dropped.add((transfers[0], dropped))
    if scene.choose.random() < 0.5:
        # who waits for a layer gets it asked for, whatever the device does
        assert transfers[-1].wait(0, LAYERS - 1, 30)
    for transfer in transfers:
        scene.play(transfer)
        assert not transfer.failed
        transfer.close()
    scene.check()


@given(st.integers(0, 1 << 32))
def test_what_has_come_by_its_event_is_there(seed: int) -> None:
    scene = Scene(seed)
    transfer = scene.submit(min(4, len(scene.targets)))
    schedule = [
        {(document, layer) for layer in batch.layers for document in batch.documents}
        for batch in transfer.schedule
    ]
    handles = {event.cuda_event: n for n, event in enumerate(transfer._events)}
    seen = []

    def come(handle: int) -> None:
        if handle not in handles:
            return
        seen.append(handles[handle])
        for document, layer in schedule[handles[handle]]:
            run = list(scene.runs[transfer][document])
            assert torch.equal(scene.pool.kv[layer][:, run], scene.before[layer][:, run])

    scene.gpu.on_event = come
    scene.play(transfer)
    assert seen == list(range(len(schedule)))


def frozen() -> tuple[PlayedGPU, CopyEngine, Transfer]:
    """An order of eight layers one by one, of which a device that does nothing is asked for two."""
    pool = make_pool()
    gpu = PlayedGPU(pool)
    copy_engine = CopyEngine(pool, gpu.device())
    record = record_of(pool, range(2), packed=False)
    limits = BatchLimits(0, 0, 1, None, 0, 1)
    schedule = CopySchedule(
        limits, tuple(CopyBatch(range(n, n + 1), range(1)) for n in range(LAYERS))
    )
    transfer = copy_engine.submit([Source(range(2), record.data_ptr(), False)], schedule, None)
    transfer.record = record  # type: ignore[attr-defined]
    return gpu, copy_engine, transfer


def test_no_more_than_a_few_parcels_are_asked_for_ahead_of_the_device() -> None:
    gpu, _, transfer = frozen()
    for come in range(LAYERS):
        with gpu.lock:
            seen = gpu.queries
            # it has looked again and again, and asks for nothing
            assert come > LAYERS - 3 or gpu.moved.wait_for(lambda n=seen: gpu.queries > n + 3, 30)
        assert transfer.num_layers(0) == min(LAYERS, come + 2)
        done = transfer.event(0, come)
        assert done is not None and not done.query()
        while not done.query():
            gpu.step()
        assert transfer.wait(0, min(LAYERS - 1, come), 30)
        while not transfer.finished and transfer.num_layers(0) < come + 3:
            with gpu.lock:
                gpu.moved.wait(1)
    assert transfer.wait_for_end(30)


def test_an_order_that_ends_with_its_courier_has_failed() -> None:
    _, copy_engine, transfer = frozen()
    waiting = threading.Thread(target=transfer.wait_for_end, args=(30,))
    waiting.start()
    copy_engine.end()
    waiting.join(10)
    assert not waiting.is_alive() and transfer.finished and transfer.failed
    assert transfer.num_layers(0) < LAYERS
    # who comes late is told so
    transfer.drop(0)
    assert not transfer.wait(0, LAYERS - 1, 30)
    late = copy_engine.submit([Source(range(2), 0, False)], transfer.schedule, None)
    assert late.wait_for_end(30) and late.failed


def test_what_finds_no_room_in_the_ring_is_refused_and_not_written() -> None:
    pool = make_pool()
    record = record_of(pool, range(4), packed=True)
    page = blocks_of(pool.kv) * BLOCK_BYTES
    gpu = PlayedGPU(pool, 7 * page)
    gpu.free = True
    copy_engine = CopyEngine(pool, gpu.device())
    schedule = CopySchedule(BatchLimits(0, 0, 1, None, 0, 1), (CopyBatch(range(1), range(1)),))
    transfer = copy_engine.submit([Source(range(4), record.data_ptr(), True)], schedule, None)
    assert transfer.wait_for_end(30) and transfer.failed and not gpu.asked
    assert "not copied" in str(transfer.error)
