"""A file that the system refuses costs its own record: neither the start, nor another record, nor
the tier."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf.tiers import DiskTier, Ledger, TierFault
from looseleaf.tiers.guard import Guard
from tests.tiers.records import content, key, put, read

LIMIT = 1 << 30


def looping(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


PLACED: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": looping,
    "a link to nothing": dangling,
    "a pipe": os.mkfifo,
}


@contextmanager
def refused(path: Path, number: int) -> Iterator[None]:
    """A system that refuses one file, whatever is asked of it but its deletion."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "open"), (os, "stat"), (os, "utime")):
            real = getattr(owner, name)

            def asked(file: Any, *about: Any, _real: Any = real, **named: Any) -> Any:
                if not isinstance(file, int) and Path(file) == path:
                    raise OSError(number, os.strerror(number), str(file))
                return _real(file, *about, **named)

            patch.setattr(owner, name, asked)
        yield


def file_of(folder: Path, number: int) -> Path:
    return folder / f"{key(number).hex()}.segment"


@pytest.mark.parametrize("kind", PLACED)
def test_what_is_no_file_costs_its_record_only(kind: str, tmp_path: Path) -> None:
    made = DiskTier(tmp_path, Ledger(LIMIT))
    put(made, 1)
    put(made, 2)
    made.put_sidecar(key(1), "bounds", {"low": torch.arange(3)})
    for path in (file_of(tmp_path, 2), tmp_path / f"{key(1).hex()}.bounds.sidecar"):
        path.unlink()
        PLACED[kind](path)
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    assert tier.contains([key(1), key(2)]) == [True, False]
    assert read(tier, 2) is None
    found = read(tier, 1)
    assert found is not None and torch.equal(found, content(1))
    counted = tier.counters.faults["unreadable"]
    assert counted >= 1
    for _ in range(3):
        tier.maintain()
        tier.contains([key(2)])
    assert tier.counters.faults["unreadable"] == counted, "each is counted once"
    assert {name for name, fault in tier.verify() if fault} >= {file_of(tmp_path, 2).name}
    if kind != "a folder":
        # it is replaced by the next that is written
        assert put(tier, 2) and read(tier, 2) is not None


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EIO, errno.EACCES, errno.EISDIR])
def test_a_file_that_is_refused_costs_its_record_only(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = DiskTier(tmp_path, Ledger(LIMIT))
    put(made, 1)
    put(made, 2)
    with refused(file_of(tmp_path, 2), number):
        # one that starts, and one that knows it already
        for tier in (DiskTier(tmp_path, Ledger(LIMIT)), made):
            guard = Guard(tier, tier.counters)
            for _ in range(4):
                assert guard.call(lambda tier: read(tier, 2), None) is None
                assert guard.call(lambda tier: read(tier, 1), None) is not None
            assert tier.counters.faults["unreadable"] == 1
            assert not guard.breaker.is_open
            assert tier.contains([key(1)]) == [True]
    assert sum(file_of(tmp_path, 2).name in one.message for one in caplog.records) >= 2
    assert read(DiskTier(tmp_path, Ledger(LIMIT)), 2) is not None


def test_bytes_that_can_not_be_read_cost_their_record_until_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    put(tier, 1)
    guard = Guard(tier, tier.counters)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        for _ in range(4):
            assert guard.call(lambda tier: read(tier, 1), None) is None
    assert tier.counters.faults == {"unreadable": 1} and not guard.breaker.is_open
    assert file_of(tmp_path, 1).exists(), "it may be sound"
    assert put(tier, 1) and read(tier, 1) is not None


def test_a_file_that_can_not_be_deleted_keeps_no_tier_from_starting_and_no_other_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DiskTier(tmp_path, Ledger(LIMIT))
    for number in range(1, 4):
        put(made, number)
    unlink = Path.unlink

    def stuck(path: Path, missing_ok: bool = False) -> None:
        if path == file_of(tmp_path, 1):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stuck)
    with pytest.raises(TierFault) as caught:
        made.delete([key(1), key(2)])
    assert caught.value.kind == "unreadable" and not file_of(tmp_path, 2).exists()
    tier = DiskTier(tmp_path, Ledger(1))
    assert list(tier.entries()) == [] and not file_of(tmp_path, 3).exists()
    assert tier.counters.faults["unreadable"] == 1


@pytest.mark.parametrize("kind", PLACED)
def test_what_lies_where_unfinished_files_belong_keeps_no_tier_from_starting(
    kind: str, tmp_path: Path
) -> None:
    if kind != "a folder":
        PLACED[kind](tmp_path / "unfinished")
    else:
        PLACED["a pipe"](DiskTier(tmp_path, Ledger(LIMIT)).folder / "unfinished" / "pipe")
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    assert put(tier, 1) and read(tier, 1) is not None


def test_a_folder_that_is_refused_is_the_tiers_fault(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    put(tier, 1)
    with refused(file_of(tmp_path, 1), errno.EIO), refused(tmp_path, errno.EIO):
        with pytest.raises(TierFault) as caught:
            read(tier, 1)
        assert caught.value.kind == "unavailable"
    assert read(tier, 1) is not None
    with refused(file_of(tmp_path, 1), errno.EMFILE), pytest.raises(TierFault) as caught:
        read(tier, 1)
    assert caught.value.kind == "unavailable"


def test_a_file_that_changes_is_looked_at_again(tmp_path: Path) -> None:
    DiskTier(tmp_path, Ledger(LIMIT))
    path = file_of(tmp_path, 1)
    looping(path)
    tier = DiskTier(tmp_path, Ledger(LIMIT))
    assert tier.contains([key(1)]) == [False]
    path.unlink()
    assert put(DiskTier(tmp_path, Ledger(LIMIT)), 1)
    tier.maintain()
    assert read(tier, 1) is not None
