"""Records on their way down: whatever the host's memory says, the tiers below get them."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from looseleaf.config import TierConfig
from looseleaf.tiers import (
    DiskTier,
    HostTier,
    Ledger,
    Record,
    Tier,
    TierCounters,
    TierFault,
    Tiers,
)
from looseleaf.tiers.asking import LookupThread
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from looseleaf.tiers.transfer.writer import Writer
from tests.tiers.records import key, numbers, put
from tests.tiers.test_pool_copy import pool

LIMIT = 1 << 20


class Scene:
    """A writer between a pool and two tiers; what it is given waits until it is let go."""

    def __init__(self, folder: Path, room: int, share: float = 1.0) -> None:
        self.copy = PoolCopy(pool(torch.float32))
        size = self.record(0).num_bytes
        self.host = HostTier(Ledger(room * size, tenant_share=share))
        self.disk = DiskTier(folder, Ledger(LIMIT))
        self.guard = Guard(self.disk, TierCounters())
        self.staging = Arena(16 * size, pinned=False)
        self.writer = Writer(self.copy, self.staging, self.host, [self.guard])
        self._gate = threading.Event()

    def record(self, number: int) -> Record:
        return self.copy.record(key(number), 37, 3)

    def keep(self, *numbers: int) -> None:
        """Records come faster than they are brought on."""
        self.writer.do(self._gate.wait)
        for number in numbers:
            assert self.writer.write_back(self.record(number), [2, 3, 4]) is not None
        self._gate.set()
        assert self.writer.flush(30)

    def nothing_is_held(self) -> bool:
        held = sum(entry.num_bytes for entry in self.host.entries())
        free = self.host._arena.free_bytes
        return (
            self.host.ledger.used == held == self.host.ledger.limit - free
            and self.staging.free_bytes == len(self.staging.memory)
        )


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(tmp_path, *request.param)
    yield made
    made.writer.close(30)


@pytest.mark.parametrize("scene", [(8, 0.25), (2, 1.0)], indirect=True)
def test_what_the_host_has_no_room_for_is_stored_below_it(scene: Scene) -> None:
    scene.keep(*range(6))
    assert sorted(numbers(scene.disk)) == list(range(6))
    assert sorted(numbers(scene.host)) == [0, 1]
    assert scene.host.counters.stored == 2 and scene.host.counters.refused == 4
    assert scene.nothing_is_held()


@pytest.mark.parametrize("scene", [(4,)], indirect=True)
def test_a_record_that_comes_twice_at_once_is_stored_below_the_host_and_held_once(
    scene: Scene,
) -> None:
    scene.keep(1, 1, 2)
    assert sorted(numbers(scene.host)) == sorted(numbers(scene.disk)) == [1, 2]
    assert scene.nothing_is_held()


@pytest.mark.parametrize("scene", [(4,)], indirect=True)
def test_a_slot_that_is_given_back_is_no_longer_counted(scene: Scene) -> None:
    slots = [scene.host.reserve(scene.record(number)) for number in range(4)]
    assert scene.host.reserve(scene.record(9)) is None
    for slot in slots:
        assert slot is not None
        scene.host.abandon(slot)
    assert scene.nothing_is_held()


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


@pytest.mark.parametrize("scene", [(4,)], indirect=True)
def test_a_writer_that_gets_no_thread_leaves_out_records_and_writes_the_next(
    scene: Scene, no_thread: pytest.MonkeyPatch
) -> None:
    put(scene.disk, 5)
    assert scene.writer.write_back(scene.record(1), [2, 3, 4]) is None
    assert scene.writer.skipped == 1
    assert scene.guard.counters.faults == {"unavailable": 1}
    scene.writer.do(lambda: scene.guard.call(lambda tier: tier.delete([key(5)]), 0) and None)
    assert not scene.writer.flush(30)
    no_thread.undo()
    scene.keep(2)
    assert numbers(scene.disk) == [2], "and a deletion that waited was done"
    assert scene.nothing_is_held()


def test_a_tier_that_can_not_be_asked_for_want_of_a_thread_is_asked_the_next_time(
    tmp_path: Path, no_thread: pytest.MonkeyPatch
) -> None:
    guard = Guard(DiskTier(tmp_path, Ledger(LIMIT)), TierCounters())
    put(guard.tier, 1)
    lookup_thread = LookupThread(guard)
    assert lookup_thread.call(lambda tier: tier.contains([key(1)]), [False], 30) == [False]
    assert guard.counters.faults == {"unavailable": 1}
    no_thread.undo()
    assert lookup_thread.call(lambda tier: tier.contains([key(1)]), [False], 30) == [True]
    lookup_thread.close()


def test_who_has_nothing_to_write_tends_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looseleaf.tiers.transfer.writer._MAINTENANCE_SECONDS", 0.01)
    tended = threading.Semaphore(0)
    copy, staging = PoolCopy(pool(torch.float32)), Arena(1, pinned=False)
    writer = Writer(copy, staging, None, [], maintain=tended.release)
    writer.do(lambda: None)
    try:
        # again and again
        assert all(tended.acquire(timeout=30) for _ in range(3))
    finally:
        writer.close(30)


def test_who_is_always_asked_for_something_tends_the_tiers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("looseleaf.tiers.transfer.writer._MAINTENANCE_SECONDS", 0.01)
    tended = threading.Event()
    copy, staging = PoolCopy(pool(torch.float32)), Arena(1, pinned=False)
    writer = Writer(copy, staging, None, [], maintain=tended.set)

    def again() -> None:
        # there is always another job
        if not tended.is_set():
            writer.do(again)

    writer.do(again)
    try:
        assert tended.wait(30)
    finally:
        tended.set()
        writer.close(30)


def test_what_is_past_its_time_goes_from_a_folder_that_nobody_uses(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    (path,) = tmp_path.glob("*.segment")
    config = TierConfig(disk_path=str(tmp_path), disk_gib=1, tier_ttl=3600)
    tiers = Tiers.create(config, pool(torch.float32))
    assert tiers is not None
    try:
        tiers.maintain()
        assert path.exists()
        (disk,) = (guard.tier for guard in tiers.guards)
        assert isinstance(disk, DiskTier)
        disk.clock = disk.ledger.clock = lambda: time.time() + 7200
        tiers.maintain()
        assert not path.exists() and disk.counters.expired == 1
        assert tiers.writer.thread is not None
    finally:
        tiers.close()


def test_looking_after_a_folder_is_no_proof_that_it_can_be_written(tmp_path: Path) -> None:
    config = TierConfig(disk_path=str(tmp_path), disk_gib=1)
    tiers = Tiers.create(config, pool(torch.float32))
    assert tiers is not None

    def fail(tier: Tier) -> bool:
        raise TierFault("unavailable", "read-only")

    try:
        (guard,) = tiers.guards
        for _ in range(3):
            assert not guard.writing.is_open
            guard.call(fail, False, writes=True)
            tiers.maintain()
        assert guard.writing.is_open
    finally:
        tiers.close()
