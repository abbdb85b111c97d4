"""What goes to make room, and what stays since its going would make none."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.tiers import DiskTier, Entry, HostTier, Ledger, TierFault
from tests.tiers.records import RECORD_BYTES, key, numbers, put, read, record


def put_wide(tier: HostTier, number: int, times: int) -> bool:
    """Store a record as long as so many others."""
    plain = record(number)
    wide = replace(plain, num_layers=times * plain.num_layers)
    layers = torch.zeros(wide.num_layers, wide.layer_bytes, dtype=torch.uint8)
    return tier.put(wide, layers)


def full_host(hot: list[int], count: int = 12) -> HostTier:
    """The host's memory with records side by side, some of which were asked for again."""
    tier = HostTier(Ledger(count * RECORD_BYTES))
    for number in range(count):
        assert put(tier, number)
    for number in hot:
        assert read(tier, number) is not None
    return tier


def test_nothing_goes_for_a_record_that_no_going_would_make_room_for() -> None:
    tier = full_host(hot=[2, 5, 8, 11])
    assert not put_wide(tier, 99, times=3)
    assert sorted(numbers(tier)) == list(range(12))
    assert (tier.counters.evicted, tier.counters.refused) == (0, 1)
    # as one that was here before it may drive hot ones out
    assert put_wide(tier, 99, times=3)
    assert tier.counters.evicted == 3


def test_only_those_go_that_lie_side_by_side() -> None:
    tier = full_host(hot=[1, 3, 5])
    assert put_wide(tier, 99, times=3)
    # 0, 2 and 4 would go first, but lie between hot ones
    assert set(range(12)) - set(numbers(tier)) == {6, 7, 8}
    assert tier.ledger.used == tier.ledger.limit


def test_memory_that_is_free_already_counts_for_a_hole() -> None:
    tier = full_host(hot=[1, 3, 5])
    tier.delete([key(7), key(9)])
    assert put_wide(tier, 99, times=3)
    assert {8} == set(range(12)) - {7, 9} - set(numbers(tier))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4_000), st.sampled_from("abc"))))
def test_what_is_refused_costs_nothing_and_what_is_admitted_finds_a_hole(
    requests: list[tuple[int, int, str]],
) -> None:
    tier = HostTier(Ledger(10_000, tenant_share=0.6))
    for number, size, what in requests:
        before, evicted = numbers(tier), tier.counters.evicted
        if what == "a" and number in before:
            tier.delete([key(number)])
            continue
        one = replace(record(number, tenant=what), num_layers=1, layer_bytes=size)
        if not tier.put(one, torch.zeros(1, size, dtype=torch.uint8)):
            assert sorted(numbers(tier)) == sorted(before)
            assert tier.counters.evicted == evicted
        assert tier.ledger.used == sum(e.num_bytes for e in tier.entries()) <= 10_000
    tier.delete([key(number) for number in range(13)])
    assert tier._arena.free_bytes == 10_000 and tier.ledger.used == 0


class Counted(Entry):
    """An entry that counts how often it is compared."""

    compared: ClassVar[int] = 0
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other


def test_entries_are_not_compared_with_each_other_to_make_room() -> None:
    ledger, count = Ledger(100 * 400, tenant_share=0.5), 400
    for number in range(count):
        ledger.add(Counted(key(number), 100, "red" if number % 2 else "blue"))
    Counted.compared = 0
    victims = ledger.victims(100 * count // 4, "red", key(count))
    assert victims is not None and len(victims) == count // 4
    assert Counted.compared < count


def test_where_a_tenant_may_have_less_than_before_its_own_records_go(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, Ledger(1 << 20))
    for number in range(8):
        put(first, number, "red" if number < 6 else "blue")
    size = first.ledger.used // 8
    tier = DiskTier(tmp_path, Ledger(8 * size, tenant_share=0.25))
    held = [entry.tenant for entry in tier.entries()]
    assert sorted(held) == ["blue", "blue", "red", "red"]
    assert len(list(tmp_path.glob("*.segment"))) == 4 and tier.counters.evicted == 4


def test_sidecars_make_room_within_the_limit(tmp_path: Path) -> None:
    ledger = Ledger(20_000)
    tier = DiskTier(tmp_path, ledger)
    for number in range(4):
        assert put(tier, number)
        assert tier.put_sidecar(key(number), "index", {"a": torch.zeros(5_000)[:1_250]})
        assert ledger.used <= ledger.limit
    assert 3 in numbers(tier) and 0 not in numbers(tier)
    assert tier.get_sidecar(key(3), "index") is not None
    assert not tier.put_sidecar(key(3), "index", {"a": torch.zeros(6_000)})
    assert tier.get_sidecar(key(3), "index") is not None and tier.counters.refused == 1
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    assert on_disk == ledger.used


def test_a_damaged_sidecar_leaves_the_books_with_its_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    put(tier, 1)
    before = tier.ledger.used
    tier.put_sidecar(key(1), "index", {"a": torch.zeros(100)})
    (path,) = tmp_path.glob("*.sidecar")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(TierFault, match="not what was stored"):
        tier.get_sidecar(key(1), "index")
    assert not path.exists()
    # one byte at the end was written over, not added
    assert tier.ledger.used == before


class SmallDisk:
    """Writes that fail where the files of a folder would have more than so many bytes."""

    def __init__(self, folder: Path, num_bytes: int, patch: pytest.MonkeyPatch) -> None:
        write = os.write

        def limited(file: int, content: bytes) -> int:
            held = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            if held + len(content) > num_bytes:
                raise OSError(self.errno, "no room")
            return write(file, content)

        self.errno = 28
        patch.setattr(os, "write", limited)


def test_on_a_disk_that_others_fill_new_records_take_the_place_of_fresh_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 30))
    assert put(tier, 0)
    assert read(tier, 0) is not None
    disk = SmallDisk(tmp_path, 3 * tier.ledger.used + 100, monkeypatch)
    for number in range(1, 6):
        assert put(tier, number)
    assert sorted(numbers(tier)) == [0, 4, 5], "the hot one stays"
    assert tier.counters.evicted == 3
    # a file that is too large for the system is not made smaller by what goes
    disk.errno = 27
    with pytest.raises(TierFault):
        put(tier, 9)
    assert sorted(numbers(tier)) == [0, 4, 5]


class Watched(Entry):
    """An entry that counts how often somebody asks whether it may go."""

    asked: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.asked += name == "pinned"
        return super().__getattribute__(name)


@pytest.mark.parametrize("ttl", [None, 3600.0])
def test_of_many_records_only_those_that_go_first_are_looked_at_to_make_room(
    monkeypatch: pytest.MonkeyPatch, ttl: float | None
) -> None:
    monkeypatch.setattr("looseleaf.tiers.stores.host.Entry", Watched)
    asked = []
    for count in (8, 800):
        tier = HostTier(Ledger(count * RECORD_BYTES, ttl))
        for number in range(count):
            assert put(tier, number)
        Watched.asked = 0
        assert put(tier, count) and tier.counters.evicted == 1
        asked.append(Watched.asked)
    assert asked[0] == asked[1]
