"""Ranks exchange addresses, also where their processes count exchanges differently."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from looseleaf.parallel.exchange_store import ExchangeStore
from looseleaf.parallel.peer_sums import PeerSums


def _exchange(store: dist.Store, number: int, rank: int, value: str) -> None:
    """The write of PyTorch's exchange, from C++."""
    dist.PrefixStore("peers", store).set(f"memory/{number}/{rank}", value)


def _received(store: dist.Store, number: int, rank: int) -> bytes:
    outer, key = dist.PrefixStore("peers", store), f"memory/{number}/{rank}"
    outer.wait([key])
    return outer.get(key)


def test_ranks_find_each_other_whose_processes_had_groups_before(tmp_path: Path) -> None:
    shared = dist.FileStore(str(tmp_path / "store"), 2)
    # the process of rank 0 has exchanged nine times, that of rank 1 never
    stores, begins = [ExchangeStore(shared), ExchangeStore(shared)], (9, 0)
    for step in range(3):
        for rank, (store, begin) in enumerate(zip(stores, begins, strict=True)):
            _exchange(store, begin + step, rank, f"{step} of {rank}")
        for rank, (store, begin) in enumerate(zip(stores, begins, strict=True)):
            other = 1 - rank
            assert _received(store, begin + step, other) == f"{step} of {other}".encode()


def test_a_group_exchanges_over_its_store(tmp_path: Path) -> None:
    shared = dist.FileStore(str(tmp_path / "store"), 1)
    store = ExchangeStore(shared)
    group = dist.ProcessGroup(store, 0, 1)
    # the keys of a rendezvous are written to the store of the group
    _exchange(group.get_group_store(), 9, 0, "address")
    assert shared.get("peers/memory/0/0") == b"address"
    assert group.get_group_store().multi_get(["peers/memory/9/0"]) == [b"address"]


def test_sums_by_peer_memory_give_their_group_that_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):
        """The group is made."""

    def make(store: dist.Store, rank: int, size: int) -> None:
        raise Made(type(store))

    monkeypatch.setattr(dist, "ProcessGroup", make)
    with pytest.raises(Made, match="ExchangeStore"):
        PeerSums(dist.FileStore(str(tmp_path / "store"), 1), None, 0, 1, torch.device("cpu"))


def test_other_keys_stay_and_a_lost_rank_ends_the_wait(tmp_path: Path) -> None:
    shared = dist.FileStore(str(tmp_path / "store"), 2)
    store = ExchangeStore(shared)
    store.set("name", b"group")
    assert shared.get("name") == store.get("name") == b"group"
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.wait(["memory/0/1"], timedelta(milliseconds=50))
