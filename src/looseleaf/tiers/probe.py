"""How fast a tier is, before anybody depends on it: records that are written, read and dropped."""

import time
from collections.abc import Iterator
from uuid import uuid4

import torch

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.base import Record, Tier
from looseleaf.tiers.disk import DiskTier

_SIZES = (1 << 18, 1 << 22)
_LAYERS = 8
# a tier that takes longer than this for one probe is known well enough
_LONGEST = 0.2


def probe(tier: Tier) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of some reads, as long as they are quick. Raises TierFault.

    From a disk nothing is read that the system still has in memory, if that can be helped."""
    for size in _SIZES:
        half = size // (2 * _LAYERS)
        key = SegmentKey(uuid4().bytes + uuid4().bytes)
        record = Record(key, half, _LAYERS, (2, 1, 1, half, 1), "U8", 2 * half, "probe")
        layers = torch.full((_LAYERS, 2 * half), 7, dtype=torch.uint8)
        if not tier.put(record, layers):
            return
        try:
            if isinstance(tier, DiskTier):
                tier.cool(key)
            seconds = _time_read(tier, record)
        finally:
            tier.delete([key])
        if seconds is None:
            return
        yield size, seconds
        if seconds > _LONGEST:
            return


def _time_read(tier: Tier, record: Record) -> float | None:
    into = torch.empty(record.layer_bytes, dtype=torch.uint8)
    begun = time.perf_counter()
    reader = tier.open(record.key)
    if reader is None:
        return None
    try:
        for layer in range(record.num_layers):
            # what lies in memory is copied from there, as a load does
            into.copy_(reader.read(layer, into))
    finally:
        reader.close()
    return time.perf_counter() - begun
