"""Between pages and records: what is copied out comes back, wherever its pages are."""

import pytest
import torch

from looseleaf.errors import InvalidOption
from looseleaf.kv.pool import PagePool
from looseleaf.tiers.transfer.copy_batches import make_schedule
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.tiers.records import key


def pool(dtype: torch.dtype, head_dim: int = 8) -> PagePool:
    made = PagePool(
        num_pages=12,
        page_size=16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made.kv.copy_(torch.randn(made.kv.shape, generator=torch.Generator().manual_seed(1)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, "packed"])
@pytest.mark.parametrize("source", [[2, 3, 4], [9, 0, 5]])
@pytest.mark.parametrize("target", [[6, 7, 8], [11, 1, 10]])
def test_a_segment_comes_back_to_any_pages_bit_by_bit(
    dtype: torch.dtype | str, source: list[int], target: list[int]
) -> None:
    packed = dtype == "packed"
    held = pool(torch.bfloat16, head_dim=64) if isinstance(dtype, str) else pool(dtype)
    copy, before = PoolCopy(held, "on" if packed else "auto"), held.kv.clone()
    record = copy.record(key(1), 37, 3)
    assert record.packed == packed and record.num_bytes == copy.num_bytes(3)
    layers = torch.full((record.num_layers, record.layer_bytes), 255, dtype=torch.uint8)
    copied = copy.read(record, source, layers)
    assert copied.event is None and copied.is_valid
    copy.write_layers(record, 0, target, layers[:1])
    copy.write_layers(record, 1, target, layers[1:])
    words = held.kv.view(torch.uint8)
    was = before.view(torch.uint8)
    assert torch.equal(words[:, :, target[:2]], was[:, :, source[:2]])
    assert torch.equal(words[:, :, target[2], :, :5], was[:, :, source[2], :, :5])
    others = [n for n in range(12) if n not in target]
    assert torch.equal(words[:, :, others], was[:, :, others])


def test_what_can_not_be_packed_says_so_and_is_stored_as_it_is() -> None:
    held = pool(torch.bfloat16, head_dim=64)
    held.kv[2, 1, 3] *= torch.where(torch.arange(64) % 2 == 1, 2.0**-40, 1.0)
    copy = PoolCopy(held, "on")
    record = copy.record(key(1), 48, 3)
    layers = torch.empty(record.num_layers, record.layer_bytes, dtype=torch.uint8)
    assert not copy.read(record, [2, 3, 4], layers).is_valid
    assert copy.read(record, [5, 6, 7], layers).is_valid
    plain = copy.record(key(1), 48, 3, packed=False)
    layers = torch.empty(plain.num_layers, plain.layer_bytes, dtype=torch.uint8)
    assert not plain.packed and copy.read(plain, [2, 3, 4], layers).is_valid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_pool_that_can_not_pack_does_so_on_no_request(dtype: torch.dtype) -> None:
    held = pool(dtype, head_dim=8 if dtype is torch.bfloat16 else 64)
    assert not PoolCopy(held, "auto").packs and not PoolCopy(held).packs
    with pytest.raises(InvalidOption, match="use auto"):
        PoolCopy(held, "on")


def test_what_lies_behind_the_end_is_not_stored() -> None:
    held = pool(torch.float32)
    copy = PoolCopy(held)
    record = copy.record(key(1), 37, 3)
    layers = torch.empty(record.num_layers, record.layer_bytes, dtype=torch.uint8)
    copy.read(record, [2, 3, 4], layers)
    stored = layers.view(torch.float32).view(3, 2, 3, 2, 16, 8)
    assert (stored[:, :, 2, :, :5] != 0).all()
    assert (stored[:, :, 2, :, 5:] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [[1], [1 << 20, 3 << 20], [9 << 20] * 5, [40 << 20] * 2])
def test_every_layer_of_every_document_is_sent_once_and_the_first_ones_first(
    sizes: list[int], packed: bool
) -> None:
    schedule = make_schedule(tuple(sizes), 32, packed=packed)
    sent: dict[int, list[int]] = {document: [] for document in range(len(sizes))}
    for number, (layers, documents) in enumerate(schedule):
        for document in documents:
            sent[document] += layers
            assert all(schedule.batch_of[document, layer] == number for layer in layers)
    assert all(layers == list(range(32)) for layers in sent.values())
    order = [layers.start for layers, _ in schedule]
    assert order == sorted(order) == schedule.array[:, 0].tolist()
    assert schedule.array[:, [1, 3]].prod(1).sum() == 32 * len(sizes)
    # what is asked for at once is little, and a step ends with what the last layer lets it compute
    first = [len(layers) * sum(sizes[n] for n in some) for layers, some in schedule.batches[:2]]
    least, most = (48 << 20, 96 << 20) if packed else (26 << 20, 78 << 20)
    assert first[0] <= max(least, *sizes) and sum(first) <= max(most, 2 * max(sizes))
    assert {0, 30, 31} <= set(order)
