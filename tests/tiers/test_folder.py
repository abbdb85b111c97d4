"""A folder that others write to as well: other engines, other containers, and people."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from looseleaf.tiers import DiskTier, Ledger, TierFault, files
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
        from looseleaf.tiers.files import create_unfinished

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
    assert wrong == {f"{key(3).hex()}.segment": "unavailable", capitals.name: "damaged"}


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
