"""Between pages and records: what is copied out comes back, wherever its pages are."""

from itertools import islice

import pytest
import torch

from looseleaf.kv.pool import PagePool
from looseleaf.tiers.base import Record, TierCounters
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.host import HostTier
from looseleaf.tiers.ledger import Ledger
from looseleaf.tiers.load import Load
from looseleaf.tiers.loader import _parcels
from looseleaf.tiers.pool_copy import PoolCopy
from tests.tiers.records import key


def pool(dtype: torch.dtype) -> PagePool:
    made = PagePool(
        num_pages=12,
        page_size=16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made.kv.copy_(torch.randn(made.kv.shape, generator=torch.Generator().manual_seed(1)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", [[2, 3, 4], [9, 0, 5]])
@pytest.mark.parametrize("target", [[6, 7, 8], [11, 1, 10]])
def test_a_segment_comes_back_to_any_pages_bit_by_bit(
    dtype: torch.dtype, source: list[int], target: list[int]
) -> None:
    held = pool(dtype)
    copy, before = PoolCopy(held), held.kv.clone()
    record = copy.record(key(1), 37, 3)
    layers = torch.full((record.num_layers, record.layer_bytes), 255, dtype=torch.uint8)
    assert copy.read(record, source, layers) is None
    copy.write_layers(0, target, layers[:1])
    copy.write_layers(1, target, layers[1:])
    words = held.kv.view(torch.uint8)
    was = before.view(torch.uint8)
    assert torch.equal(words[:, :, target[:2]], was[:, :, source[:2]])
    assert torch.equal(words[:, :, target[2], :, :5], was[:, :, source[2], :, :5])
    others = [n for n in range(12) if n not in target]
    assert torch.equal(words[:, :, others], was[:, :, others])


def test_what_lies_behind_the_end_is_not_stored() -> None:
    held = pool(torch.float32)
    copy = PoolCopy(held)
    record = copy.record(key(1), 37, 3)
    layers = torch.empty(record.num_layers, record.layer_bytes, dtype=torch.uint8)
    copy.read(record, [2, 3, 4], layers)
    stored = layers.view(torch.float32).view(3, 2, 3, 2, 16, 8)
    assert (stored[:, :, 2, :, :5] != 0).all()
    assert (stored[:, :, 2, :, 5:] == 0).all()


@pytest.mark.parametrize("sizes", [[1], [1 << 20, 3 << 20], [9 << 20] * 5, [40 << 20] * 2])
def test_every_layer_of_every_document_is_sent_once_and_the_first_ones_first(
    sizes: list[int],
) -> None:
    copy, guard = PoolCopy(pool(torch.float32)), Guard(HostTier(Ledger(1)), TierCounters())
    loads = [
        Load(
            Record(key(n), 5, 32, (2, 1, 1, 1, size // 2), "U8", size), [n], copy, guard, 1.0, None
        )
        for n, size in enumerate(sizes)
    ]
    sent: dict[Load, list[int]] = {load: [] for load in loads}
    order = []
    for layers, some in _parcels(loads):
        order.append(layers.start)
        for load in some:
            sent[load] += layers
    assert all(layers == list(range(32)) for layers in sent.values())
    assert order == sorted(order)
    # what is asked for at once is little, and a step ends with what the last layer lets it compute
    at_once = islice(_parcels(loads), 2)
    first = [
        len(layers) * sum(load.record.layer_bytes for load in some) for layers, some in at_once
    ]
    assert first[0] <= max(26 << 20, *sizes) and sum(first) <= max(78 << 20, 2 * max(sizes))
    assert {0, 30, 31} <= set(order)
