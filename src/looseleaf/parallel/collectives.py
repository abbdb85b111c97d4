"""Sums, maxima and concatenations over all ranks, on CPUs by gloo and on GPUs by NCCL.

The groups belong to their engine. PyTorch's default group stays free for the caller. All ranks get
the same bits."""

import logging
import shutil
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore, PrefixStore

from looseleaf.config.engine import AllReduce
from looseleaf.errors import InvalidOption
from looseleaf.parallel.peer_sums import PeerSums

_STORE = "store"
# time limit for NCCL to end; its graphs may end later
_ABORT_SECONDS = 5.0
# time limit of reads of the store once all ranks are connected
_STORE_WAIT = timedelta(seconds=1)
_log = logging.getLogger(__name__)


@runtime_checkable
class Collectives(Protocol):
    """Operations that all ranks call in the same order, with tensors of the same shape."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks. May overwrite ``part``, and the next call the result."""
        ...

    def largest(self, part: Tensor) -> Tensor:
        """The elementwise maximum over ranks. May overwrite ``part``."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, ``[size, *part.shape]``."""
        ...

    def broadcast(self, value: Tensor) -> Tensor:
        """The value of rank 0; overwrites ``value`` of the others."""
        ...

    def close(self) -> None:
        """End the group, and unblock a call that waits for a lost rank. Rank 0 removes the folder
        in which the ranks found each other."""
        ...


class ProcessGroup:
    """Collectives by a process group of PyTorch.

    ``folder`` is removed after the group's end; None where another rank removes it."""

    def __init__(self, group: Any, size: int, folder: Path | None = None) -> None:
        self._group, self._size, self._folder = group, size, folder

    def sum(self, part: Tensor) -> Tensor:
        return self._reduce(part, dist.ReduceOp.SUM)

    def largest(self, part: Tensor) -> Tensor:
        return self._reduce(part, dist.ReduceOp.MAX)

    def gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        whole = torch.empty((self._size, *part.shape), dtype=part.dtype, device=part.device)
        self._group.allgather([[*whole.unbind()]], [part]).wait()
        return whole

    def broadcast(self, value: Tensor) -> Tensor:
        self._group.broadcast([value], dist.BroadcastOptions()).wait()
        return value

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._group.abort()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reduce(self, part: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if not part.numel():
            return part
        part, options = part.contiguous(), dist.AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        self._group.allreduce([part], options).wait()
        return part


class NcclGroup(ProcessGroup):
    """Collectives of NCCL on the current stream, which graphs capture."""

    def close(self) -> None:
        """End the group, in a thread that goes on after the time limit.

        NCCL unblocks its kernels first, and then waits for the end of graphs that captured it.
        Until then a thread of PyTorch reads the store every second. Without the folder this
        thread, and the destructor, wait for the store's time limit."""
        thread = threading.Thread(target=self._end, name="looseleaf-nccl", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def gather(self, part: Tensor) -> Tensor:
        part, options = part.contiguous(), AllgatherOptions()
        options.asyncOp = False
        whole = torch.empty((self._size, *part.shape), dtype=part.dtype, device=part.device)
        _finish(self._group._allgather_base(whole, part, options))
        return whole

    def broadcast(self, value: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.asyncOp = False
        _finish(self._group.broadcast([value], options))
        return value

    def _reduce(self, part: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        part, options = part.contiguous(), dist.AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        options.asyncOp = False
        _finish(self._group.allreduce([part], options))
        return part


class PeerGroup:
    """The collectives of ``group``, with sums of few rows by peer memory."""

    def __init__(self, group: NcclGroup, sums: PeerSums) -> None:
        self._group, self._sums = group, sums
        self.largest, self.gather, self.broadcast = group.largest, group.gather, group.broadcast

    def sum(self, part: Tensor) -> Tensor:
        return self._sums.sum(part) if self._sums.fits(part) else self._group.sum(part)

    def close(self) -> None:
        try:
            self._sums.release()
        finally:
            self._group.close()


def _finish(work: Any) -> None:
    """Order later kernels after ``work``, None if they are already."""
    if work is not None:
        work.wait()


def make_collectives(
    device: torch.device, rank: int, size: int, folder: Path, all_reduce: AllReduce = "nccl"
) -> Collectives:
    """The group of ``size`` ranks of one host that share ``folder``, an empty folder.

    Blocks until all ranks have called it. Raises InvalidOption without the library."""
    store, own_folder = FileStore(str(folder / _STORE), size), folder if rank == 0 else None
    if device.type == "cpu":
        if not dist.is_gloo_available():
            raise InvalidOption(
                "this build of PyTorch has no gloo, which tensor_parallel needs on a CPU: install "
                "another build, or leave it out",
                "tensor_parallel",
            )
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # all ranks are on this host
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroup(dist.ProcessGroupGloo(store, rank, size, options), size, own_folder)
    if not dist.is_nccl_available():
        raise InvalidOption(
            "this build of PyTorch has no NCCL, which tensor_parallel needs on GPUs: install "
            "another build, or leave it out",
            "tensor_parallel",
        )
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL
    backend = nccl(store, rank, size, nccl.Options())
    group = NcclGroup(backend, size, own_folder)
    try:
        # connects, which a capture must not do
        group.sum(torch.zeros(1, device=device))
        collectives: Collectives = group
        if all_reduce != "nccl":
            collectives = _with_peers(group, backend, store, rank, size, device)
    except BaseException:
        group.close()
        raise
    store.set_timeout(_STORE_WAIT)
    return collectives


def _with_peers(
    group: NcclGroup, backend: Any, store: FileStore, rank: int, size: int, device: torch.device
) -> Collectives:
    """``group`` with sums by peer memory, if all GPUs can read each other's memory.

    Logs a warning if not."""
    sums, error = None, None
    try:
        sums = PeerSums(PrefixStore("peers", store), backend, rank, size, device)
    except Exception as failure:
        error = failure
    failed = group.largest(torch.tensor([sums is None], dtype=torch.int32, device=device))
    if int(failed) or sums is None:
        if sums is not None:
            sums.release()
        reason = error or "another rank has no peer memory"
        _log.warning("sums over GPUs use NCCL alone, which is slower for few rows: %r", reason)
        return group
    return PeerGroup(group, sums)


def make_folder() -> Path:
    """An empty folder in which ranks of this host find each other."""
    return Path(tempfile.mkdtemp(prefix="looseleaf-ranks-"))
