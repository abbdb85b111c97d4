"""Entry points of searches cover the top lists of as many queries as possible."""

import pytest
import torch

from looseleaf.config import IndexConfig
from looseleaf.index import GraphIndex, KeyVectors, build_index, load_index, search
from looseleaf.index.graph import covering
from looseleaf.ops.nearest_keys import nearest_keys
from tests.index.vectors import layer


def test_each_entry_is_in_most_of_the_lists_that_have_none_before() -> None:
    keys, queries = layer(600, 300)
    lists = nearest_keys(queries, keys, 10).ids
    lists[::7, 6:] = -1
    entries = covering(lists, 600, 40).tolist()
    left = [set(row) - {-1} for row in lists.tolist()]
    for entry in entries:
        counts = [sum(key in row for row in left) for key in range(600)]
        assert counts[entry] == max(counts) > 1 and counts.index(max(counts)) == entry
        left = [row for row in left if entry not in row]
    assert entries and max(sum(key in row for row in left) for key in range(600)) < 2


@pytest.mark.parametrize("lists", [torch.full((3, 4), -1), torch.zeros(0, 4)])
def test_lists_of_nothing_have_no_entries(lists: torch.Tensor) -> None:
    assert len(covering(lists.int(), 5000, 9)) == 0
    assert len(covering(lists.int(), 5000)) == 0


def test_a_graph_begins_at_such_keys_and_each_is_there_once() -> None:
    keys, queries = layer(6000, 1500)
    index = build_index(KeyVectors.create(keys), IndexConfig("graph"), queries[64:])
    assert isinstance(index, GraphIndex)
    begun = index.order[: index.num_entries].tolist()
    assert len(set(begun)) == len(begun)
    lists = nearest_keys(queries[64:], keys, 100).ids
    assert begun[:2] == covering(lists, 6000).tolist()
    loaded = load_index(index.arrays(), index.keys, index.config)
    assert torch.equal(search(index, queries[:64], 50).ids, search(loaded, queries[:64], 50).ids)
