"""Sums of few rows over GPUs that read each other's memory, in one kernel of PyTorch.

Every GPU copies its part to a symmetric buffer, waits for the others, and reads theirs. NCCL's
kernel takes about twice as long for few rows (docs/log.md). Multicast is not used."""

import time
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from looseleaf.parallel.exchange_store import ExchangeStore

_BYTES = 1 << 22
"""Size of the buffer. Larger sums are bound by bandwidth."""

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNED = 16
# time limit for a kernel to end after the loss of a rank
_RELEASE_SECONDS = 10.0


class PeerSums:
    """Sums over ``size`` ranks of one host. All ranks call the same methods in the same order.

    Raises RuntimeError where GPUs can't read each other's memory."""

    def __init__(
        self, store: Any, backend: Any, rank: int, size: int, device: torch.device
    ) -> None:
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        # the name is PyTorch's key for the group, in each process
        if rank == 0:
            store.set("name", f"looseleaf-{uuid.uuid4().hex}")
        self._name = store.get("name").decode()
        self._rank, self._size, self._device = rank, size, device
        self._exchange = ExchangeStore(store)
        # the operator finds its group by the name, and PyTorch takes either store for an exchange
        group = dist.ProcessGroup(self._exchange, rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(device, kind, backend)
        group._set_group_name(self._name)
        _register_process_group(self._name, group)
        _SymmetricMemory.set_group_info(self._name, rank, size, self._exchange)
        shape, strides = (_BYTES,), (1,)
        self._buffer = _SymmetricMemory.empty_strided_p2p(shape, strides, torch.uint8, device)
        self._memory = _SymmetricMemory.rendezvous(self._buffer, self._name)
        # fails here rather than in a step
        self.sum(torch.ones(64, dtype=torch.bfloat16, device=device))
        torch.cuda.synchronize(device)

    def fits(self, part: Tensor) -> bool:
        """Whether `sum` takes ``part``."""
        return 0 < part.nbytes <= _BYTES and part.nbytes % _ALIGNED == 0 and part.dtype in _DTYPES

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, a new tensor."""
        part = part.contiguous()
        buffer = self._buffer[: part.nbytes].view(part.dtype).view(part.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            buffer, part, "sum", self._name
        )
        return summed

    def release(self) -> None:
        """Let kernels go on that wait for a lost rank; their results are wrong.

        A kernel waits until its own signals are 1, and until those of the others are 0."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)
        stream = torch.cuda.Stream(self._device)
        pads = [self._memory.get_signal_pad(rank, dtype=torch.int32) for rank in range(self._size)]
        own = pads.pop(self._rank)
        end = time.monotonic() + _RELEASE_SECONDS
        while not torch.cuda.default_stream(self._device).query() and time.monotonic() < end:
            with torch.cuda.stream(stream):
                own.fill_(1)
                for pad in pads:
                    pad.zero_()
            stream.synchronize()
