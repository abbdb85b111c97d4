"""Measures a tier at start: writes, reads and deletes probe records."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Record, Tier
from looseleaf.tiers.stores.disk import DiskTier
from looseleaf.tiers.transfer.speed import Probe

_SIZES = (1 << 18, 1 << 22)
# smaller reads do not show the rate of a GPU
_LARGEST = 1 << 26
_LAYERS = 8
# slower tiers need no larger probe
_LONGEST = 0.2
# limit for starting threads
_LONGEST_START = 10.0


def probe(tier: Tier, device: torch.device, workers: int) -> Iterator[Probe]:
    """Yields timed reads of rising sizes to ``device``, while they are fast. Raises TierFault.

    ``workers`` threads read a record each in parallel, then one thread reads alone. An uncounted
    read comes first, because a thread's first GPU call is slow. Disk reads bypass the page cache
    where the system allows it."""
    sizes = (*_SIZES, _LARGEST // workers) if device.type == "cuda" else _SIZES
    with ThreadPoolExecutor(workers, "looseleaf-probe") as pool:
        for size in sizes:
            half = size // (2 * _LAYERS)
            keys = [SegmentKey(uuid4().bytes + uuid4().bytes) for _ in range(workers)]
            layers = torch.full((_LAYERS, 2 * half), 7, dtype=torch.uint8)
            reads = [_Read(tier, key, half, device) for key in keys]
            try:
                if not all(_put(tier, read.record, layers) for read in reads):
                    return
                seconds = _parallel_seconds(pool, reads)
                if seconds is not None and seconds <= _LONGEST:
                    seconds = _parallel_seconds(pool, reads)
                alone = _parallel_seconds(pool, reads[:1])
            finally:
                tier.delete(keys)
            if seconds is None or alone is None:
                return
            yield Probe(layers.numel(), alone, seconds, workers)
            if seconds > _LONGEST:
                return


def _put(tier: Tier, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
    # probes must not evict documents
    return (
        tier.put(record, layers, makes_room=False)
        if isinstance(tier, DiskTier)
        else tier.put(record, layers)
    )


def _parallel_seconds(pool: ThreadPoolExecutor, reads: "Sequence[_Read]") -> float | None:
    """Seconds until the last of parallel ``reads`` ends; None if a record is gone."""
    tier = reads[0].tier
    if isinstance(tier, DiskTier):
        for read in reads:
            tier.drop_page_cache(read.record.key)
    gate = threading.Barrier(len(reads), timeout=_LONGEST_START)

    def timed(read: _Read) -> float | None:
        gate.wait()
        return read.seconds()

    each = [seconds for seconds in pool.map(timed, reads) if seconds is not None]
    return max(each) if len(each) == len(reads) else None


class _Read:
    """A probe record, and buffers to read it into; ``half`` is the bytes of a layer's K."""

    def __init__(self, tier: Tier, key: SegmentKey, half: int, device: torch.device) -> None:
        self.record = Record(key, half, _LAYERS, (2, 1, 1, half, 1), "U8", 2 * half, "probe")
        self.tier, self._on_gpu = tier, device.type == "cuda"
        self._into = torch.empty(2 * half, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._pages = torch.zeros(2 * half, dtype=torch.uint8, device=device)

    def seconds(self) -> float | None:
        """Duration of one read; None if the record is gone."""
        begun = time.perf_counter()
        reader = self.tier.open(self.record.key)
        if reader is None:
            return None
        try:
            for layer in range(_LAYERS):
                content = reader.read(layer, self._into)
                if self._on_gpu:
                    self._pages.copy_(content, non_blocking=True)
                else:
                    # numpy as in loads, because PyTorch's thread pool starts slowly
                    np.copyto(self._pages.numpy(), content.numpy())
            if self._on_gpu:
                torch.cuda.synchronize(self._pages.device)
        finally:
            reader.close()
        return time.perf_counter() - begun
