"""Records to store, and the tiers to store them in."""

import torch
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import Record, Tier

LAYERS, SHAPE = 3, (2, 2, 2, 4, 8)
LAYER_BYTES = 2 * 2 * 2 * 4 * 8 * 4
RECORD_BYTES = LAYERS * LAYER_BYTES


def key(number: int) -> SegmentKey:
    return SegmentKey(number.to_bytes(32, "big"))


def record(number: int, tenant: str = "") -> Record:
    return Record(key(number), 7, LAYERS, SHAPE, "F32", LAYER_BYTES, tenant)


def content(number: int) -> Tensor:
    """What record ``number`` holds."""
    generator = torch.Generator().manual_seed(number)
    size = (LAYERS, LAYER_BYTES)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def put(tier: Tier, number: int, tenant: str = "") -> bool:
    return tier.put(record(number, tenant), content(number))


def read(tier: Tier, number: int) -> Tensor | None:
    """All layers of a record, None if it is not there."""
    reader = tier.open(key(number))
    if reader is None:
        return None
    try:
        assert reader.record == record(number, reader.record.tenant)
        into = torch.empty(LAYER_BYTES, dtype=torch.uint8)
        return torch.stack([reader.read(layer, into).clone() for layer in range(LAYERS)])
    finally:
        reader.close()


def numbers(tier: Tier) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in tier.entries()]
