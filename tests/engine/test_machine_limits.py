"""What a process may have is what the machine has, or what the tightest limit leaves of it."""

from pathlib import Path

import psutil
import pytest
import torch

from looseleaf.engine.runner import runner
from looseleaf.machine import limits as machine_limits
from looseleaf.machine.limits import available_memory, usable_cores

FREE = 64 << 30


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limited(limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon {usage}\ninactive_file {inactive}\n",
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_without_limits_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == FREE
    write(tmp_path, {"proc/self/cgroup": "0::/\n"} | under("sys/fs/cgroup", limited("max", 5)))
    assert available_memory(tmp_path) == FREE


def test_a_limit_leaves_what_nobody_holds_or_would_give_back(tmp_path: Path) -> None:
    files = under("sys/fs/cgroup", limited("1000000", 400_000, 100_000))
    write(tmp_path, {"proc/self/cgroup": "0::/\n"} | files)
    assert available_memory(tmp_path) == 700_000


def test_the_tightest_of_all_groups_counts(tmp_path: Path) -> None:
    files = under("sys/fs/cgroup/a.slice", limited("500000", 100_000))
    files |= under("sys/fs/cgroup/a.slice/b.service", limited("900000", 100_000))
    write(tmp_path, {"proc/self/cgroup": "0::/a.slice/b.service\n"} | files)
    assert available_memory(tmp_path) == 400_000


def test_a_container_is_found_under_a_path_that_is_not_its_own(tmp_path: Path) -> None:
    """As the first version of the interface has it, in a namespace of files only."""
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": "1000000",
        f"{folder}/memory.usage_in_bytes": "600000",
        f"{folder}/memory.stat": "inactive_file 7\ntotal_inactive_file 50000\n",
    }
    listed = "5:cpu,cpuacct:/docker/0a\n4:memory:/docker/0a\n1:name=systemd:/docker/0a\n0::/\n"
    write(tmp_path, {"proc/self/cgroup": listed} | files)
    assert available_memory(tmp_path) == 450_000


def test_a_group_that_holds_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = under("sys/fs/cgroup", limited("1000", 5000))
    write(tmp_path, {"proc/self/cgroup": "0::/\n"} | files)
    assert available_memory(tmp_path) == 0


def test_a_pool_takes_a_quarter_of_what_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory", lambda: 1 << 30)
    assert runner._spare_bytes(torch.device("cpu")) == 1 << 28


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits.os, "sched_getaffinity", lambda process: set(range(16)))


@pytest.mark.parametrize(
    ("written", "cores"),
    [("max 100000", 16), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1)],
)
def test_cores_are_those_of_the_quota(
    tmp_path: Path, sixteen_cores: None, written: str, cores: int
) -> None:
    assert usable_cores(tmp_path) == 16
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/cpu.max": written}
    assert usable_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 16), (250_000, 3)])
def test_the_first_version_of_the_interface_tells_a_quota_too(
    tmp_path: Path, sixteen_cores: None, quota: int, cores: int
) -> None:
    folder = "sys/fs/cgroup/cpu"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    listed = "5:cpu,cpuacct:/docker/0a\n4:memory:/docker/0a\n0::/\n"
    assert usable_cores(write(tmp_path, {"proc/self/cgroup": listed} | files)) == cores
