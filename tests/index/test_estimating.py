"""Keys without a hit count by their cluster; exactly, if the keys of a cluster are equal."""

import pytest
import torch
from torch import Tensor

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index import (
    Heads,
    IvfIndex,
    KeyVectors,
    SegmentIndex,
    attend_estimated,
    build_segment,
    search,
)
from tests.index.vectors import Made, layer

CONFIG = IndexConfig("ivf", sink=2, local=3, estimate=True)
SCALE = 32**-0.5


def made(keys: Tensor, values: Tensor, config: IndexConfig = CONFIG) -> IvfIndex:
    index = IvfIndex.build(KeyVectors.create(keys), config)
    index.sum_values(values)
    return index


def estimated(index: IvfIndex, query: Tensor, values: Tensor, count: int, effort: int) -> Tensor:
    """Output, then lse."""
    hits = search(index, query[None], count, effort)
    found = hits.ids[0], hits.scores[0]
    state = attend_estimated(index, query, found, KeyVectors(values, len(values)), SCALE)
    return torch.cat((state.out, state.lse[None]))


def dense(keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
    scores = keys.double() @ query.double() * SCALE
    return torch.cat((scores.softmax(0) @ values.double(), scores.logsumexp(0)[None])).float()


def test_clusters_of_identical_keys_are_estimated_exactly() -> None:
    """However few keys are found, and though no two values are alike: but for the half precision of
    stored means."""
    topics, queries = layer(40, 6, 32, 1)
    # k-means begins with every 16th key, more or less: with one of each topic
    keys = topics.repeat_interleave(16, 0)
    values = torch.randn(640, 32, generator=torch.Generator().manual_seed(1))
    index = made(keys, values)
    for query in queries:
        for count in (1, 20, 100):
            mine = estimated(index, query, values, count, 8)
            torch.testing.assert_close(mine, dense(keys, values, query), rtol=0, atol=2e-3)


def test_a_small_budget_errs_less_with_an_estimate() -> None:
    keys, queries = layer(4000, 40, 32, 2)
    topic = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    values = torch.tanh(keys @ topic) + 0.3 * torch.randn_like(keys)
    index, errors = made(keys, values), torch.zeros(2)
    for query in queries:
        whole = dense(keys, values, query)[:-1]
        with_it = estimated(index, query, values, 20, 16)[:-1]
        ids = search(index, query[None], 20, 16).ids[0].long()
        without = dense(keys[ids], values[ids], query)[:-1]
        errors += torch.stack([(x - whole).norm() / whole.norm() for x in (with_it, without)])
    assert errors[0] < 0.5 * errors[1]


def test_all_keys_found_leave_nothing_to_estimate() -> None:
    keys, queries = layer(300, 1, 32, 4)
    values = torch.randn(300, 32)
    mine = estimated(made(keys, values), queries[0], values, 300, 300)
    torch.testing.assert_close(mine, dense(keys, values, queries[0]), rtol=0, atol=1e-5)


def test_keys_that_are_newer_than_the_clusters_count_if_they_are_found() -> None:
    keys, queries = layer(300, 1, 32, 5)
    values = torch.randn(310, 32)
    index = made(keys, values)
    index.insert(queries.repeat(10, 1))
    whole = torch.cat((keys, queries.repeat(10, 1)))
    mine = estimated(index, queries[0], values, 310, 300)
    torch.testing.assert_close(mine, dense(whole, values, queries[0]), rtol=0, atol=1e-4)
    index.fold()
    assert index.estimate is not None and len(index.estimate.means) < len(index.means)
    mine = estimated(index, queries[0], values, 310, 300)
    torch.testing.assert_close(mine, dense(whole, values, queries[0]), rtol=0, atol=1e-4)


class WithValues(Made):
    def value_rows(self, layer_: int, kv_head: int) -> Tensor:
        return self.keys(layer_, kv_head).flip(1)


def test_mean_values_are_stored_with_the_index() -> None:
    vectors, heads = WithValues(200), Heads(2, 4, 2)
    index = build_segment(vectors, 200, heads, CONFIG)
    again = SegmentIndex.load(index.arrays(), vectors)
    assert again.config == CONFIG
    for place, unit in index.units.items():
        other = again.units[place]
        assert isinstance(unit, IvfIndex) and isinstance(other, IvfIndex)
        assert unit.estimate is not None and other.estimate is not None
        assert all(torch.equal(a, b) for a, b in zip(unit.estimate, other.estimate, strict=True))
    arrays = index.arrays()
    arrays["0.0.value_means"] = arrays["0.0.value_means"][:, :4]
    with pytest.raises(InvalidOption, match="do not fit together"):
        SegmentIndex.load(arrays, vectors)
    del arrays["0.0.value_means"]
    with pytest.raises(InvalidOption, match="damaged"):
        SegmentIndex.load(arrays, vectors)


def test_what_has_no_clusters_or_values_is_refused() -> None:
    with pytest.raises(InvalidOption, match="give kind 'ivf'"):
        IndexConfig("graph", estimate=True)
    with pytest.raises(InvalidOption, match="needs an ivf index and values"):
        build_segment(Made(200), 200, Heads(2, 4, 2), CONFIG)
