"""A tier is measured as it will be asked: by as many hands at the same time."""

import threading
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import HostTier, Ledger, Reader, Record
from looseleaf.tiers.probe import probe


class Together(HostTier):
    """Gives no layer before so many readers ask for one."""

    def gather(self, hands: int) -> None:
        self.barrier = threading.Barrier(hands, timeout=20)

    def open(self, key: SegmentKey) -> "Reader | None":  # type: ignore[override]
        reader = super().open(key)
        return None if reader is None else _Waiting(reader, self.barrier)


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


def measured(tier: Together, hands: int) -> Iterator[tuple[int, float]]:
    tier.gather(hands)
    return probe(tier, torch.device("cpu"), hands)


@pytest.mark.parametrize("hands", [1, 2, 5])
def test_as_many_read_at_a_time_as_will(hands: int) -> None:
    tier = Together(Ledger(1 << 26))
    found = list(measured(tier, hands))
    assert [num_bytes for num_bytes, _ in found] == [1 << 18, 1 << 22][: len(found)] and found
    assert all(seconds > 0 for _, seconds in found)
    assert list(tier.entries()) == []


def test_a_tier_without_room_for_all_of_them_is_left_as_it_was() -> None:
    tier = Together(Ledger(1 << 21))
    # one size fits, the next does not
    assert [num_bytes for num_bytes, _ in measured(tier, 3)] == [1 << 18]
    assert list(tier.entries()) == []
