"""How much memory is free on the host: the machine's, or what a container's limit leaves of it."""

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may take without anybody being ended for it. Under a limit that is
    less than the machine has: who takes more is ended by the kernel, without a word.

    ``root`` is where the system's own files are found."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *_left_by_limits(root)]))


def _left_by_limits(root: Path) -> Iterator[int]:
    """What is left of the limit of each group of processes that this one is in."""
    mounted = root / "sys/fs/cgroup"
    for group, version in _groups(root / "proc/self/cgroup"):
        folder = mounted / "memory" if version == 1 else mounted
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        # in a container its own group may be what is mounted, under whatever path outside
        for part in (group, *group.parents):
            inside = folder / part.relative_to("/")
            try:
                limit, usage = (
                    int((inside / f"memory.{name}").read_text(encoding="ascii")) for name in names
                )
            except (OSError, ValueError):
                # no limit, or no such group here
                continue
            yield limit - usage + _reclaimable(inside / "memory.stat", version)


def _groups(listed: Path) -> Iterator[tuple[Path, int]]:
    """The groups that have to do with memory, with their version of the interface."""
    try:
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if ".." not in path and (number == "0" or "memory" in controllers.split(",")):
            yield Path(path), 1 if controllers else 2


def _reclaimable(stat: Path, version: int) -> int:
    """Bytes of files that were read once: they count as used, and give way."""
    wanted = "total_inactive_file" if version == 1 else "inactive_file"
    try:
        pairs = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
        return int(dict(pair for pair in pairs if len(pair) == 2).get(wanted, 0))
    except (OSError, ValueError):
        return 0
