"""What comes from below is kept in the host's memory, unless it was deleted on its way."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.tiers import DiskTier, HostTier, Ledger, Record, TierCounters, WrappedTier
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.transfer.loader import Loader
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.tiers.records import key


class _Held(WrappedTier):
    """A disk whose records are read when the test says so."""

    def __init__(self, tier: DiskTier) -> None:
        super().__init__(tier)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def open(self, key: SegmentKey) -> "_HeldReader":
        return _HeldReader(self, key)


class _HeldReader:
    def __init__(self, held: _Held, key: SegmentKey) -> None:
        self.held, reader = held, held.tier.open(key)
        assert reader is not None
        self.reader = reader

    @property
    def record(self) -> Record:
        return self.reader.record

    def read(self, layer: int, into: Tensor) -> Tensor:
        self.held.reading.set()
        assert self.held.go_on.wait(15)
        return self.reader.read(layer, into)

    def close(self) -> None:
        self.reader.close()


@pytest.mark.parametrize("deleted", [False, True])
def test_what_is_deleted_while_it_comes_is_not_in_the_hosts_memory_then(
    tmp_path: Path, deleted: bool
) -> None:
    pool = PagePool(
        num_pages=4, page_size=16, num_layers=2, num_kv_heads=1, head_dim=8,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    copy, host = PoolCopy(pool), HostTier(Ledger(1 << 20))
    disk = DiskTier(tmp_path, Ledger(1 << 20))
    record = copy.record(key(1), 30, 2)
    disk.put(record, torch.zeros(2, record.layer_bytes, dtype=torch.uint8))
    held = _Held(disk)
    guard = Guard(held, TierCounters())  # type: ignore[arg-type]
    staging = Arena(1 << 20, pinned=False)
    loader = Loader(guard, copy, staging, host, 20.0, lambda *seen: None)
    (load,) = loader.begin([(record, [0, 1])])
    assert held.reading.wait(15)
    for tier in (host, disk) if deleted else ():
        tier.delete([record.key])
    held.go_on.set()
    assert load.wait_for_end(15) and load.state == "done"
    loader.close()
    for thread in loader.threads:
        thread.join(15)
    assert host.contains([record.key]) == [not deleted]
    disk.close()
