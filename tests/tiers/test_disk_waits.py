"""Whoever asks a folder for a record does not wait for those who list it or write to it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from looseleaf.tiers import DiskTier, Ledger
from looseleaf.tiers.stores import disk as disk_module
from tests.tiers.records import key, numbers, put, read

SIDE = {"bounds": torch.arange(6.0)}


def beside(act: Callable[[], object]) -> list[object]:
    """What ``act`` gives in another thread; nothing if it does not end."""
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.append(act()), daemon=True)
    thread.start()
    thread.join(10)
    return heard


def tiers(folder: Path) -> tuple[DiskTier, Callable[[], None]]:
    """A tier with record 1, and a call that has it list its folder at its next write."""
    now = [1e9]
    tier = DiskTier(folder, Ledger(1 << 20), clock=lambda: now[0])
    put(tier, 1)

    def later() -> None:
        now[0] += 10

    return tier, later


def during_a_listing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[object]:
    """What ``act`` gave in another thread when the folder was listed, once it is; filled then."""
    heard, listdir = list[object](), os.listdir

    def listed(path: Path) -> list[str]:
        names = listdir(path)
        if not heard:
            heard.extend(beside(act))
        return names

    monkeypatch.setattr(os, "listdir", listed)
    return heard


def test_a_record_is_found_while_the_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, later = tiers(tmp_path)
    heard = during_a_listing(monkeypatch, lambda: tier.contains([key(1), key(9)]))
    later()
    assert put(tier, 2)
    assert heard == [[True, False]]


def test_what_comes_while_the_folder_is_listed_stays_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, later = tiers(tmp_path)
    heard = during_a_listing(monkeypatch, lambda: put(tier, 3))
    later()
    tier.maintain()
    assert heard == [True] and sorted(numbers(tier)) == [1, 3]
    assert tier.ledger.used == sum(path.stat().st_size for path in tmp_path.glob("*.segment"))


def test_what_goes_while_the_folder_is_listed_stays_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, later = tiers(tmp_path)
    put(DiskTier(tmp_path, Ledger(1 << 20)), 2)
    heard = during_a_listing(monkeypatch, lambda: tier.delete([key(1), key(2)]))
    later()
    tier.maintain()
    assert heard == [2]
    assert (len(tier.ledger), tier.ledger.used) == (0, 0)


def test_a_record_is_read_while_its_side_car_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = tiers(tmp_path)
    heard, write_all = list[object](), disk_module.write_all

    def written(file: int, content: bytes) -> None:
        write_all(file, content)
        heard.extend(beside(lambda: read(tier, 1) is not None))

    monkeypatch.setattr(disk_module, "write_all", written)
    assert tier.put_sidecar(key(1), "bounds", SIDE)
    assert heard == [True]
    assert tier.ledger.used == sum(path.stat().st_size for path in tmp_path.glob("*.s*"))


def test_a_side_car_whose_record_goes_meanwhile_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = tiers(tmp_path)
    write_all = disk_module.write_all

    def written(file: int, content: bytes) -> None:
        write_all(file, content)
        assert beside(lambda: tier.delete([key(1)])) == [1]

    monkeypatch.setattr(disk_module, "write_all", written)
    assert not tier.put_sidecar(key(1), "bounds", SIDE)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    assert tier.ledger.used == 0
