"""What this process may have of the host: the machine's memory and cores, or what a container's
limits leave of them."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may take without anybody being ended for it. Under a limit that is
    less than the machine has: who takes more is ended by the kernel, without a word.

    ``root`` is where the system's own files are found."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *_memory_left(root)]))


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy. More threads under a quota are stopped for most of
    the time, each in the middle of something that the others wait for."""
    machine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([machine or 1, *_cores_allowed(root)]))


def _memory_left(root: Path) -> Iterator[int]:
    """What is left of the limit of each group of processes that this one is in."""
    for folder, version in _folders(root, "memory"):
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        try:
            limit, usage = (int(_read(folder / f"memory.{name}")) for name in names)
        except (OSError, ValueError):
            # no limit, or no such group here
            continue
        yield limit - usage + _reclaimable(folder / "memory.stat", version)


def _cores_allowed(root: Path) -> Iterator[int]:
    """The quota of each of these groups, in whole cores."""
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
    """Where the limits of a kind are written of the groups that this process is in, and by which
    version of the interface."""
    mounted = root / "sys/fs/cgroup"
    for group, version in _groups(root / "proc/self/cgroup", controller):
        folder = mounted / controller if version == 1 else mounted
        # in a container its own group may be what is mounted, under whatever path outside
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
    """Bytes of files that were read once: they count as used, and give way."""
    wanted = "total_inactive_file" if version == 1 else "inactive_file"
    try:
        pairs = (line.split() for line in _read(stat).splitlines())
        return int(dict(pair for pair in pairs if len(pair) == 2).get(wanted, 0))
    except (OSError, ValueError):
        return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")
