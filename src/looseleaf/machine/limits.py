"""The memory and cores that this process may use, within a container's limits."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may allocate before the kernel kills a process.

    A cgroup's limit may be below the machine's memory. ``root`` is the root of the file system."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *_memory_left(root)]))


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy, at least 1.

    A quota stops more threads most of the time, while other threads wait for them."""
    machine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([machine or 1, *_cores_allowed(root)]))


def _memory_left(root: Path) -> Iterator[int]:
    """The rest of the memory limit of each cgroup of this process, in bytes."""
    for folder, version in _folders(root, "memory"):
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        try:
            limit, usage = (int(_read(folder / f"memory.{name}")) for name in names)
        except (OSError, ValueError):
            # no limit, or no such group
            continue
        yield limit - usage + _reclaimable(folder / "memory.stat", version)


def _cores_allowed(root: Path) -> Iterator[int]:
    """The CPU quota of each cgroup of this process, in whole cores."""
    for folder, version in _folders(root, "cpu"):
        try:
            if version == 1:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = (int(_read(folder / name)) for name in names)
            else:
                quota, period = map(int, _read(folder / "cpu.max").split())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            yield math.ceil(quota / period)


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders with limits of ``controller`` for this process, and their cgroup version."""
    mounted = root / "sys/fs/cgroup"
    for group, version in _groups(root / "proc/self/cgroup", controller):
        folder = mounted / controller if version == 1 else mounted
        # a container may mount its own group as the root, with an outer path
        for part in (group, *group.parents):
            yield folder / part.relative_to("/"), version


def _groups(listed: Path, controller: str) -> Iterator[tuple[Path, int]]:
    try:
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if ".." not in path and (number == "0" or controller in controllers.split(",")):
            yield Path(path), 1 if controllers else 2


def _reclaimable(stat: Path, version: int) -> int:
    """Bytes of the page cache, which count as used and are reclaimable."""
    field = "total_inactive_file" if version == 1 else "inactive_file"
    try:
        pairs = (line.split() for line in _read(stat).splitlines())
        return int(dict(pair for pair in pairs if len(pair) == 2).get(field, 0))
    except (OSError, ValueError):
        return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")
