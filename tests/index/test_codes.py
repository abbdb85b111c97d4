"""Codes order keys nearly as the keys themselves do, and a graph is walked by them alike in C and
in PyTorch."""

import numpy as np
import pytest
import torch

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index import GraphIndex, KeyVectors, build_index, load_index, search
from looseleaf.index.codes import LEVELS, encode, unpack
from looseleaf.index.native import load_index_library
from looseleaf.index.projection import entries_of, order_of
from tests.index.vectors import layer


def everyone(num: int) -> torch.Tensor:
    return torch.arange(num, dtype=torch.int32)


def nobody(head_dim: int) -> torch.Tensor:
    return torch.empty(0, head_dim)


def graph(num: int = 1500, head_dim: int = 32) -> tuple[GraphIndex, torch.Tensor]:
    keys, queries = layer(num, num, head_dim)
    index = build_index(KeyVectors.create(keys), IndexConfig("graph", degree=8), queries[64:])
    assert isinstance(index, GraphIndex)
    return index, queries[:64]


@pytest.mark.parametrize("head_dim", [7, 32])
def test_codes_stand_for_keys_within_a_step(head_dim: int) -> None:
    keys = torch.randn(3000, head_dim, generator=torch.Generator().manual_seed(0)) * 3 + 5
    order = everyone(3000).flip(0)
    codes, steps = encode(KeyVectors.create(keys), order, nobody(head_dim))
    levels = unpack(codes, head_dim)
    assert codes.shape == (3000, (head_dim + 1) // 2) and int(levels.max()) == LEVELS - 1
    again = levels * steps
    off = (again - again.mean(0)) - (keys[order.long()] - keys.mean(0))
    # sixteen levels of normal numbers: an error of 0.0115 of the variance (Max 1960, table II)
    assert float((off.square().mean(0) / keys.var(0)).max()) < 0.014


def test_codes_are_rounded_for_what_queries_ask() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4000, 32, generator=generator) + 2
    few = torch.randn(6, 32, generator=generator)
    learnt, asked = (
        torch.randn(300, 6, generator=generator) @ few
        + 0.1 * torch.randn(300, 32, generator=generator)
        + 5 * few[0]
        for _ in range(2)
    )
    order = everyone(4000).flip(0)
    errors = []
    for queries in (nobody(32), learnt):
        codes, steps = encode(KeyVectors.create(keys), order, queries)
        off = unpack(codes, 32) * steps - keys[order.long()]
        # an equal error of all keys does not change rankings
        errors.append(float(((off - off.mean(0)) @ asked.T).square().mean()))
    # queries span 6 of 32 dims, so the other dims can compensate errors
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("length", [2.0**-100, 2.0**100])
def test_codes_are_the_same_for_queries_of_any_length(length: float) -> None:
    keys, queries = layer(500, 40, 16)
    codes, _ = encode(KeyVectors.create(keys), everyone(500), queries)
    again, _ = encode(KeyVectors.create(keys), everyone(500), queries * length)
    assert torch.equal(codes, again)
    nothing, _ = encode(KeyVectors.create(keys), everyone(500), queries * 0)
    alone, _ = encode(KeyVectors.create(keys), everyone(500), nobody(16))
    assert torch.equal(nothing, alone)


def test_keys_that_are_far_out_widen_the_steps() -> None:
    keys = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    _, narrow = encode(KeyVectors.create(keys), everyone(2000), nobody(8))
    keys[::50] *= 40
    codes, wide = encode(KeyVectors.create(keys), everyone(2000), nobody(8))
    assert bool((wide > 4 * narrow).all())
    off = unpack(codes, 8) * wide - keys
    assert bool(((off - off.mean(0)).std(0) < 0.7 * keys.std(0)).all())


def test_equal_keys_have_equal_codes_and_no_keys_have_none() -> None:
    codes, steps = encode(
        KeyVectors.create(torch.full((50, 16), 3.0)), everyone(50), torch.ones(3, 16)
    )
    assert len(codes.unique(dim=0)) == 1 and bool(steps.isfinite().all())
    codes, steps = encode(KeyVectors.create(torch.empty(0, 16)), everyone(0), nobody(16))
    assert codes.shape == (0, 8) and steps.shape == (16,)


@pytest.mark.parametrize("head_dim", [7, 192])
def test_codes_of_any_width_are_compared_alike(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, queries = graph(400, head_dim)
    load_index_library("search.c", index.keys)
    fast = search(index, queries[:12], 30)
    monkeypatch.setattr("looseleaf.index.searching.try_native", lambda keys: None)
    slow = search(index, queries[:12], 30)
    # codes' scores are whole numbers: both walks are the same, vertex by vertex
    assert torch.equal(fast.scanned, slow.scanned)
    torch.testing.assert_close(fast.scores, slow.scores, rtol=1e-5, atol=1e-4)


def test_a_query_finds_the_same_at_any_length() -> None:
    index, queries = graph()
    hits = search(index, queries, 20)
    for length in (2.0**-20, 2.0**10):
        again = search(index, queries * length, 20)
        assert torch.equal(again.ids, hits.ids)
    nothing = search(index, queries[:1] * 0, 20)
    assert bool((nothing.ids >= 0).all())


def test_vertices_are_what_is_reached_neighbours_near_each_other() -> None:
    index, _ = graph()
    order, links = index.order, index.links
    assert len(order.unique()) == len(order) < len(index)
    assert links.shape[1] % 16 == 0 and int(links.max()) < len(order)
    assert len(index.codes) == len(order) and index.num_bytes < 100 * len(index)
    # each but the entries is behind one before it
    first = torch.full((len(order),), len(order))
    vertices = torch.arange(len(order))[:, None].expand_as(links)[links >= 0]
    first.scatter_reduce_(0, links[links >= 0].long(), vertices, "amin")
    later = torch.arange(len(order)) >= index.num_entries
    assert bool((first < torch.arange(len(order)))[later].all())
    assert bool((first[later].diff() >= 0).all())


def test_c_and_numpy_meet_keys_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = KeyVectors.create(torch.randn(300, 16, generator=generator))
    links = torch.randint(0, 300, (300, 3), generator=generator, dtype=torch.int32)
    links[torch.rand(300, generator=generator) < 0.5] = -1
    entries = entries_of(keys, links, torch.ones(300, dtype=torch.int64))
    fast = order_of(keys, links, entries)
    monkeypatch.setattr("looseleaf.index.projection.try_native", lambda keys, name: None)
    assert torch.equal(fast, order_of(keys, links, entries)) and len(fast) < 300


def test_a_graph_of_an_earlier_version_is_refused_with_a_reason() -> None:
    index, _ = graph(300)
    arrays = index.arrays()
    earlier = {n: a for n, a in arrays.items() if n not in ("codes", "steps", "order")}
    with pytest.raises(InvalidOption, match="earlier version"):
        load_index(earlier, index.keys, index.config)
    for name, wrong in (("order", 300), ("entries", 0), ("links", len(index.links))):
        wild = np.array(arrays[name])
        wild.reshape(-1)[0] = wrong
        with pytest.raises(InvalidOption, match="do not fit together"):
            load_index({**arrays, name: wild}, index.keys, index.config)
