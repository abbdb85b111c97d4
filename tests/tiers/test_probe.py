"""A tier is measured as it will be asked: by as many hands at the same time."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import DiskTier, HostTier, Ledger, Reader, Record
from looseleaf.tiers.transfer.probe import probe
from looseleaf.tiers.transfer.speed import Probe
from tests.tiers.records import numbers, put


class Together(HostTier):
    """Gives no layer before so many readers ask for one, until all of them have read twice what was
    put last; who comes later reads alone."""

    def gather(self, workers: int) -> None:
        self.workers, self.opened = workers, 0
        self.barrier = threading.Barrier(workers, timeout=20)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        self.opened = 0
        return super().put(record, layers)

    def open(self, key: SegmentKey) -> "Reader | None":  # type: ignore[override]
        with self._lock:
            self.opened += 1
            alone = self.opened > 2 * self.workers
        reader = super().open(key)
        return reader if reader is None or alone else _Waiting(reader, self.barrier)


class _Waiting:
    def __init__(self, reader: Reader, barrier: threading.Barrier) -> None:
        self._reader, self._barrier = reader, barrier

    @property
    def record(self) -> Record:
        return self._reader.record

    def read(self, layer: int, into: UInt8[Tensor, " n"]) -> UInt8[Tensor, " n"]:
        self._barrier.wait()
        return self._reader.read(layer, into)

    def close(self) -> None:
        self._reader.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looseleaf.tiers.transfer.probe._LONGEST", 60.0)


def measured(tier: Together, workers: int) -> Iterator[Probe]:
    tier.gather(workers)
    return probe(tier, torch.device("cpu"), workers)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_as_many_read_at_a_time_as_will(workers: int) -> None:
    tier = Together(Ledger(1 << 26))
    found = list(measured(tier, workers))
    assert [probe.num_bytes for probe in found] == [1 << 18, 1 << 22]
    assert all(
        min(probe.single_seconds, probe.parallel_seconds) > 0 and probe.workers == workers
        for probe in found
    )
    assert list(tier.entries()) == []


def test_a_tier_without_room_for_all_of_them_is_left_as_it_was() -> None:
    tier = Together(Ledger(1 << 21))
    # one size fits, the next does not
    assert [one.num_bytes for one in measured(tier, 3)] == [1 << 18]
    assert list(tier.entries()) == []


def test_measuring_a_full_folder_drops_nothing_from_it(tmp_path: Path) -> None:
    filled = DiskTier(tmp_path, Ledger(1 << 30))
    for number in range(6):
        put(filled, number)
    full = DiskTier(tmp_path, Ledger(filled.ledger.used))
    assert list(probe(full, torch.device("cpu"), 2))
    assert sorted(numbers(full)) == list(range(6))
    assert full.counters.evicted == full.counters.refused == 0
    assert full.ledger.used == filled.ledger.used
