"""Engines of several ranks: rank 0 starts the others, and all load their slices of the model."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path

import torch

from looseleaf.config import EngineConfig, TierConfig
from looseleaf.engine.engine import Engine
from looseleaf.errors import EngineFault, IntegrityError, InvalidOption, LooseleafError
from looseleaf.machine.limits import usable_cores
from looseleaf.parallel import Link, RankProcesses, Ranks, Shard, make_collectives
from looseleaf.parallel.collectives import make_folder

# time limits for a rank after the end of rank 0: to leave a step, and to end its writes
_LEAVE_SECONDS, _END_SECONDS = 5.0, 40.0
MakeEngine = Callable[[EngineConfig, Ranks], Engine]


@dataclass(frozen=True)
class RankStart:
    """The start of a rank: ``make`` builds its engine, and is sent by name."""

    make: MakeEngine
    config: EngineConfig
    device: str
    folder: Path


def start_ranks(make: MakeEngine, config: EngineConfig, device: torch.device) -> Engine:
    """The engine of rank 0 among ``config.tensor_parallel`` ranks, whose processes it starts.

    ``make`` builds the engine of a rank, and must be a module's function or a partial of one.
    Raises InvalidOption for missing devices, and the errors of ``make`` on any rank."""
    size = config.tensor_parallel
    if device.index is not None:
        raise InvalidOption(
            f"tensor_parallel={size} uses the first {size} GPUs: set device to cuda, and choose "
            "GPUs by CUDA_VISIBLE_DEVICES",
            "device",
            "tensor_parallel",
        )
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidOption(
            f"tensor_parallel={size} needs {size} GPUs, and PyTorch sees "
            f"{torch.cuda.device_count()}: lower it",
            "tensor_parallel",
        )
    if device.type == "cpu" and config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        config = replace(config, threads=max(1, usable_cores() // size))
    folder = make_folder()
    processes = RankProcesses(__name__, size)
    link = Link(0, processes.connections)
    try:
        for connection in processes.connections:
            # the rank's end is reported by `make_rank`
            with contextlib.suppress(OSError):
                connection.send(RankStart(make, config, device.type, folder))
        return make_rank(RankStart(make, config, device.type, folder), link, processes)
    except BaseException:
        processes.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise


def make_rank(start: RankStart, link: Link, processes: RankProcesses | None = None) -> Engine:
    """The engine of this rank.

    Raises EngineFault on rank 0 if another rank has ended."""
    shard = Shard(link.rank, start.config.tensor_parallel)
    device = torch.device(start.device if start.device == "cpu" else f"cuda:{link.rank}")
    config = start.config
    # the collectives would wait minutes for a rank that has ended
    link.agree("start", None, lambda values: None)
    collectives = make_collectives(device, shard.rank, shard.size, start.folder, config.all_reduce)
    ranks = Ranks(shard, collectives, link, processes)
    if processes is not None:
        processes.watch(lambda rank: ranks.lose())
    try:
        return start.make(rank_config(config, shard, device), ranks)
    except BaseException:
        if processes is not None:
            # the other ranks end with their processes
            collectives.close()
        raise


def rank_config(config: EngineConfig, shard: Shard, device: torch.device) -> EngineConfig:
    """The configuration of one rank: its device, and its share of host memory and disk.

    Raises InvalidOption for a server that ranks can't share."""
    tiers, name = config.tiers, f"rank-{shard.rank}-of-{shard.size}"
    disk_path = None if tiers.disk_path is None else str(Path(tiers.disk_path).expanduser() / name)
    return replace(
        config,
        device=str(device),
        cache=replace(config.cache, kv_events=None if shard.rank else config.cache.kv_events),
        tiers=replace(
            tiers,
            host_gib=tiers.host_gib / shard.size,
            disk_path=disk_path,
            disk_gib=tiers.disk_gib / shard.size,
            remote_url=_rank_url(tiers, name),
        ),
    )


def _rank_url(tiers: TierConfig, name: str) -> str | None:
    url = tiers.remote_url
    if url is None:
        return None
    if not url.startswith("s3://"):
        raise InvalidOption(
            "tensor_parallel stores documents in host memory, on disk or in an object store, not "
            "in Redis: give remote_url as s3://…, or leave one of them out",
            "tensor_parallel",
            "remote_url",
        )
    place, mark, query = url.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


def main(rank: int, file: int) -> None:
    """Run rank ``rank``, whose connection to rank 0 is ``file``, until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # rank 0 ends the others
        signal.signal(number, signal.SIG_IGN)
    is_leaving = threading.Event()
    threading.Thread(target=_end_with_rank_0, args=(is_leaving,), daemon=True).start()
    connection = Connection(file)
    link = Link(rank, [connection])
    try:
        engine = make_rank(connection.recv(), link)
        follow(engine, link)
    except BaseException as error:
        link.fail(error)
        # threads and collectives of a failed rank may never end
        os._exit(1)
    is_leaving.set()
    engine.close()
    os._exit(0)


def follow(engine: Engine, link: Link) -> None:
    """Execute the commands of rank 0 until its end."""
    while (command := link.receive()) is not None:
        method, arguments = attrgetter(command.path)(engine), command.arguments
        if command.path == "add":
            # deadlines are those of rank 0's clock
            arguments = [replace(arguments[0], deadline=None)]
        try:
            method(*arguments, **command.options)
        except (EngineFault, IntegrityError):
            raise
        except LooseleafError:
            # rank 0 refuses it too
            continue


def _end_with_rank_0(is_leaving: threading.Event) -> None:
    """End this process some time after rank 0, also if it waits for other ranks."""
    sys.stdin.buffer.read()
    if is_leaving.wait(_LEAVE_SECONDS):
        threading.Event().wait(_END_SECONDS)
    os._exit(1)
