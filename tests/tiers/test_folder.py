"""A folder that others write to as well: other engines, other containers, and people."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from looseleaf.tiers import DiskTier, Ledger, TierFault
from looseleaf.tiers.stores import files
from tests.tiers.records import content, key, numbers, put, read

LIMIT = 1 << 20


def test_a_record_that_another_engine_has_deleted_is_written_anew(tmp_path: Path) -> None:
    mine, other = (DiskTier(tmp_path, Ledger(LIMIT)) for _ in range(2))
    put(mine, 1)
    other.delete([key(1)])
    assert put(mine, 1)
    found = read(other, 1)
    assert found is not None and torch.equal(found, content(1))
    assert mine.ledger.used == sum(p.stat().st_size for p in tmp_path.glob("*.segment"))


def test_a_file_that_is_being_written_is_left_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, write, others = DiskTier(tmp_path, Ledger(LIMIT)), os.write, list[DiskTier]()

    def interrupted(file: int, content: bytes) -> int:
        # another engine starts, in another container
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            others.append(DiskTier(tmp_path, Ledger(LIMIT)))
        return write(file, content)

    monkeypatch.setattr(os, "write", interrupted)
    # which no process of this machine has
    monkeypatch.setattr(os, "getpid", lambda: (1 << 22) + 1)
    assert put(tier, 1)
    assert len(others) == 2 and list((tmp_path / "unfinished").iterdir()) == []
    assert read(others[0], 1) is not None


def test_what_a_killed_process_of_any_number_left_is_deleted(tmp_path: Path) -> None:
    DiskTier(tmp_path, Ledger(LIMIT))
    left = [tmp_path / "unfinished" / f"{number}-1-0" for number in (1, os.getpid(), 999999999)]
    for path in left:
        path.write_bytes(b"half")
    killed = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from looseleaf.tiers.stores.files import create_unfinished

        os.write(create_unfinished(Path(sys.argv[1])), b"half")
        os._exit(9)
        """
    )
    left.append(tmp_path / "unfinished" / "killed")
    done = subprocess.run([sys.executable, "-c", killed, str(left[-1])], timeout=120)
    assert done.returncode == 9 and left[-1].exists()
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    assert not any(path.exists() for path in left)
    assert list(tier.verify()) == []


def test_without_locks_only_what_was_left_alone_for_a_day_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    old, young = (tmp_path / "unfinished" / name for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 100_000, time.time() - 100_000))
    assert numbers(DiskTier(tmp_path, Ledger(LIMIT))) == [1]
    assert young.exists() and not old.exists()


def test_a_new_file_that_is_deleted_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, create, deleted = tmp_path / "new", os.open, list[int]()

    def too_late(*about: object) -> int:
        file = create(*about)  # type: ignore[arg-type]
        if not deleted:
            deleted.append(file)
            path.unlink()
        return file

    monkeypatch.setattr(os, "open", too_late)
    file = files.create_unfinished(path)
    monkeypatch.undo()
    assert os.fstat(file).st_nlink == 1 and path.exists()
    os.close(file)


def test_neither_a_folder_nor_a_name_in_capitals_is_a_record(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, Ledger(LIMIT))
    put(first, 10)
    put(first, 1)
    path = tmp_path / f"{key(10).hex()}.segment"
    capitals = tmp_path / f"{key(10).hex().upper()}.segment"
    path.rename(capitals)
    (tmp_path / f"{key(3).hex()}.segment").mkdir()
    tier = DiskTier(tmp_path, Ledger(1))
    assert numbers(tier) == [] and tier.counters.evicted == 1
    wrong = {name: fault.kind for name, fault in tier.verify() if fault is not None}
    assert wrong == {f"{key(3).hex()}.segment": "unreadable", capitals.name: "damaged"}


def test_a_header_of_brackets_is_damage(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    (path,) = tmp_path.glob("*.segment")
    deep = b"[" * 200_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    assert [fault is not None and fault.kind for _, fault in tier.verify()] == ["damaged"]
    with pytest.raises(TierFault, match="can't be read"):
        read(tier, 1)
    assert not path.exists() and put(tier, 1)


def written_and_used(folder: Path, used: dict[int, float]) -> None:
    """Records 1 to 4 in the order of their numbers, asked for again at such times after that."""
    tier, now = DiskTier(folder, Ledger(LIMIT)), time.time() - 1000
    for number in range(1, 5):
        put(tier, number)
        path = folder / f"{key(number).hex()}.segment"
        os.utime(path, (now + number, now + number))
        if number in used:
            os.utime(path, (now + used[number], now + number))


def test_a_start_leaves_the_order_of_use_as_it_is(tmp_path: Path) -> None:
    written_and_used(tmp_path, {1: 100})
    for _ in range(3):
        tier = DiskTier(tmp_path, Ledger(LIMIT))
        assert numbers(tier) == [2, 3, 4, 1]
        assert all(fault is None for _, fault in tier.verify())


def test_what_was_asked_for_before_a_restart_is_hot_behind_it(tmp_path: Path) -> None:
    written_and_used(tmp_path, {1: 100, 3: 90})
    size = next(tmp_path.glob("*.segment")).stat().st_size
    tier = DiskTier(tmp_path, Ledger(5 * size))
    # a scan of documents that come once
    for number in range(10, 20):
        assert put(tier, number)
    assert {1, 3} < set(numbers(tier)) and len(numbers(tier)) == 5


def test_engines_that_share_a_folder_keep_to_one_limit(tmp_path: Path) -> None:
    now = time.time()

    def clock() -> float:
        return now

    put(DiskTier(tmp_path / "size", Ledger(LIMIT)), 1)
    size = next((tmp_path / "size").glob("*.segment")).stat().st_size
    shared = tmp_path / "shared"
    mine, other = (DiskTier(shared, Ledger(6 * size), clock=clock) for _ in range(2))
    for number in range(30):
        put(mine if number % 3 else other, number)
        now += 2
        # no more than what both write until they count again
        assert len(list(shared.glob("*.segment"))) <= 6 + 3
    now += 10
    put(mine, 100)
    assert len(list(shared.glob("*.segment"))) <= 6
    assert mine.ledger.used == sum(path.stat().st_size for path in shared.glob("*.segment"))


def test_room_that_another_engine_has_made_is_room(tmp_path: Path) -> None:
    put(DiskTier(tmp_path / "size", Ledger(LIMIT)), 1)
    size = next((tmp_path / "size").glob("*.segment")).stat().st_size
    now = time.time()
    mine, other = (DiskTier(tmp_path, Ledger(4 * size), clock=lambda: now) for _ in range(2))
    for number in range(4):
        put(mine, number)
    other.delete([key(0), key(2)])
    now += 10
    assert put(mine, 9)
    assert sorted(numbers(mine)) == [1, 3, 9]
    assert mine.counters.evicted == 0


def test_what_is_past_its_time_goes_though_nothing_is_written(tmp_path: Path) -> None:
    now = time.time()
    made = DiskTier(tmp_path, Ledger(LIMIT, ttl=10, clock=lambda: now), clock=lambda: now)
    put(made, 1)
    now += 11
    made.maintain()
    assert list(tmp_path.glob("*.segment")) == [] and made.counters.expired == 1
    put(made, 2)
    now += 11
    # and at a start
    again = DiskTier(tmp_path, Ledger(LIMIT, ttl=10, clock=lambda: now), clock=lambda: now)
    assert list(tmp_path.glob("*.segment")) == [] and again.counters.expired == 1


def test_a_file_of_the_future_is_as_old_as_it_is_known(tmp_path: Path) -> None:
    now = time.time()
    put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    (path,) = tmp_path.glob("*.segment")
    os.utime(path, (now + 1e7, now + 1e7))
    tier = DiskTier(tmp_path, Ledger(LIMIT, ttl=10, clock=lambda: now), clock=lambda: now)
    assert read(tier, 1) is not None
    now += 11
    assert read(tier, 1) is None


def test_books_follow_what_people_delete(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    put(tier, 1)
    for path in tmp_path.glob("*.segment"):
        path.unlink()
    tier.maintain()
    assert (len(tier.ledger), tier.ledger.used) == (0, 0)


def test_a_file_is_its_owners_and_their_groups(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    finally:
        os.umask(before)
    (path,) = tmp_path.glob("*.segment")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    now = time.time()
    folder = tmp_path / "documents"
    tier = DiskTier(folder, Ledger(LIMIT), clock=lambda: now)
    put(tier, 1)
    shutil.rmtree(folder)
    now += 10
    tier.maintain()
    assert (len(tier.ledger), tier.ledger.used) == (0, 0)
    assert put(tier, 1) and read(tier, 1) is not None
