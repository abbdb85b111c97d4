"""How fast a tier is, before anybody depends on it: records that are written, read and dropped."""

import time
from collections.abc import Iterator
from uuid import uuid4

import numpy as np
import torch

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.base import Record, Tier
from looseleaf.tiers.disk import DiskTier

_SIZES = (1 << 18, 1 << 22)
# what a GPU takes is told by more than that only
_LARGEST = 1 << 26
_LAYERS = 8
# a tier that takes longer than this for one probe is known well enough
_LONGEST = 0.2


def probe(tier: Tier, device: torch.device) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of some reads to ``device``, as long as they are quick. Raises TierFault.

    From a disk nothing is read that the system still has in memory, if that can be helped."""
    for size in (*_SIZES, _LARGEST) if device.type == "cuda" else _SIZES:
        half = size // (2 * _LAYERS)
        key = SegmentKey(uuid4().bytes + uuid4().bytes)
        record = Record(key, half, _LAYERS, (2, 1, 1, half, 1), "U8", 2 * half, "probe")
        layers = torch.full((_LAYERS, 2 * half), 7, dtype=torch.uint8)
        if not tier.put(record, layers):
            return
        try:
            if isinstance(tier, DiskTier):
                tier.cool(key)
            seconds = _time_read(tier, record, device)
        finally:
            tier.delete([key])
        if seconds is None:
            return
        yield size, seconds
        if seconds > _LONGEST:
            return


def _time_read(tier: Tier, record: Record, device: torch.device) -> float | None:
    on_gpu = device.type == "cuda"
    into = torch.empty(record.layer_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    pages = torch.zeros(record.layer_bytes, dtype=torch.uint8, device=device)
    if on_gpu:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    reader = tier.open(record.key)
    if reader is None:
        return None
    try:
        for layer in range(record.num_layers):
            content = reader.read(layer, into)
            if on_gpu:
                pages.copy_(content, non_blocking=True)
            else:
                # by numpy, as a load does: PyTorch's threads would take longer to begin
                np.copyto(pages.numpy(), content.numpy())
        if on_gpu:
            torch.cuda.synchronize(device)
    finally:
        reader.close()
    return time.perf_counter() - begun
