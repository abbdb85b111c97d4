"""How fast a tier is, before anybody depends on it: records that are written, read and dropped."""

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
# what a GPU takes is told by more than that only
_LARGEST = 1 << 26
_LAYERS = 8
# a tier that takes longer than this for one probe is known well enough
_LONGEST = 0.2
# seconds in which threads start
_LONGEST_START = 10.0


def probe(tier: Tier, device: torch.device, hands: int) -> Iterator[Probe]:
    """Some reads to ``device``, as long as they are quick. Raises TierFault.

    So many ``hands`` read at the same time, as the threads of a load do, each a record of its own,
    and then one of them alone. They have read it once before, which is not counted: the first call
    of a thread to a GPU takes longer than some megabytes do. From a disk nothing is read that the
    system still has in memory, if that can be helped."""
    sizes = (*_SIZES, _LARGEST // hands) if device.type == "cuda" else _SIZES
    with ThreadPoolExecutor(hands, "looseleaf-probe") as pool:
        for size in sizes:
            half = size // (2 * _LAYERS)
            keys = [SegmentKey(uuid4().bytes + uuid4().bytes) for _ in range(hands)]
            layers = torch.full((_LAYERS, 2 * half), 7, dtype=torch.uint8)
            reads = [_Read(tier, key, half, device) for key in keys]
            try:
                if not all(_put(tier, read.record, layers) for read in reads):
                    return
                seconds = _together(pool, reads)
                if seconds is not None and seconds <= _LONGEST:
                    seconds = _together(pool, reads)
                alone = _together(pool, reads[:1])
            finally:
                tier.delete(keys)
            if seconds is None or alone is None:
                return
            yield Probe(layers.numel(), alone, seconds, hands)
            if seconds > _LONGEST:
                return


def _put(tier: Tier, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
    # no document goes for what is measured
    return (
        tier.put(record, layers, makes_room=False)
        if isinstance(tier, DiskTier)
        else tier.put(record, layers)
    )


def _together(pool: ThreadPoolExecutor, reads: "Sequence[_Read]") -> float | None:
    """Seconds until the last of ``reads`` is done, each by a thread of its own, which begin at the
    same time; None if a record is gone."""
    tier = reads[0].tier
    if isinstance(tier, DiskTier):
        for read in reads:
            tier.cool(read.record.key)
    gate = threading.Barrier(len(reads), timeout=_LONGEST_START)

    def timed(read: _Read) -> float | None:
        gate.wait()
        return read.seconds()

    each = [seconds for seconds in pool.map(timed, reads) if seconds is not None]
    return max(each) if len(each) == len(reads) else None


class _Read:
    """One record of bytes, ``half`` of a layer each its K and V, and room to read it to."""

    def __init__(self, tier: Tier, key: SegmentKey, half: int, device: torch.device) -> None:
        self.record = Record(key, half, _LAYERS, (2, 1, 1, half, 1), "U8", 2 * half, "probe")
        self.tier, self._on_gpu = tier, device.type == "cuda"
        self._into = torch.empty(2 * half, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._pages = torch.zeros(2 * half, dtype=torch.uint8, device=device)

    def seconds(self) -> float | None:
        """How long it takes to read it; None if it is gone."""
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
                    # by numpy, as a load does: PyTorch's threads would take longer to begin
                    np.copyto(self._pages.numpy(), content.numpy())
            if self._on_gpu:
                torch.cuda.synchronize(self._pages.device)
        finally:
            reader.close()
        return time.perf_counter() - begun
