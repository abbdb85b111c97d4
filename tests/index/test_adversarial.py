"""Keys that indexes are not made for: equal, heavy-tailed, repeated, few, broken."""

import pytest
import torch
from torch import Tensor

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index import KeyVectors, build_index, choose_index, load_index, search
from looseleaf.index.choosing import recall_of
from looseleaf.index.searching import search_each
from looseleaf.ops.nearest_keys import nearest_keys

KINDS = pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
CONFIG = {kind: IndexConfig(kind=kind, top=20, degree=8) for kind in ("flat", "ivf", "graph")}  # type: ignore[arg-type]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def all_equal() -> Tensor:
    return torch.ones(500, 16)


def heavy_tailed() -> Tensor:
    return normal(500, 16) * torch.logspace(0, 4, 500)[torch.randperm(500)][:, None]


def repeated() -> Tensor:
    return normal(25, 16).repeat(20, 1)


def zero() -> Tensor:
    return torch.zeros(500, 16)


@KINDS
@pytest.mark.parametrize("keys", [all_equal(), heavy_tailed(), repeated(), zero()])
def test_odd_keys_are_found_by_their_scores(kind: str, keys: Tensor) -> None:
    queries = normal(300, 16) + 1
    vectors = KeyVectors.create(keys)
    index = build_index(vectors, CONFIG[kind], queries[:250])
    hits = search(index, queries[250:], 10)
    assert recall_of(hits, nearest_keys(queries[250:], keys, 10)) > 0.9
    for row in hits.ids:
        found = row[row >= 0]
        assert len(found.unique()) == len(found)


@KINDS
@pytest.mark.parametrize("num", [0, 1, 3])
def test_fewer_keys_than_asked_for_are_all_found(kind: str, num: int) -> None:
    keys, queries = normal(num, 16), normal(9, 16)
    index = build_index(KeyVectors.create(keys), CONFIG[kind], queries)
    hits = search(index, queries, 5)
    assert (hits.ids >= 0).sum(1).tolist() == [num] * 9
    assert hits.ids[:, :num].sort(1).values.tolist() == [list(range(num))] * 9
    loaded = load_index(index.arrays(), KeyVectors.create(keys), CONFIG[kind])
    assert torch.equal(search(loaded, queries, 5).ids, hits.ids)
    index.insert(normal(4, 16))
    assert (search(index, queries, 5).ids >= 0).sum(1).tolist() == [min(num + 4, 5)] * 9


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_and_queries_that_are_no_numbers_are_refused(kind: str, bad: float) -> None:
    keys, queries = normal(50, 16), normal(30, 16)
    broken = keys.clone()
    broken[7, 3] = bad
    with pytest.raises(InvalidOption, match="key 7 is not finite"):
        KeyVectors.create(broken)
    index = build_index(KeyVectors.create(keys), CONFIG[kind], queries)
    with pytest.raises(InvalidOption, match="not finite"):
        index.insert(broken)
    assert len(index) == 50
    with pytest.raises(InvalidOption, match="query is not finite"):
        search(index, broken[7:8], 3)
    with pytest.raises(InvalidOption, match="dims"):
        search(index, normal(2, 8), 3)
    with pytest.raises(InvalidOption, match="at least one key"):
        search(index, queries, 0)


def test_finite_keys_out_of_the_range_of_fp16_are_refused() -> None:
    with pytest.raises(InvalidOption, match="float16"):
        KeyVectors.create(torch.full((3, 16), 1e6), "float16")


def test_a_graph_without_queries_and_a_choice_without_any_are_refused() -> None:
    keys = KeyVectors.create(normal(50, 16))
    with pytest.raises(InvalidOption, match="learns from queries"):
        build_index(keys, IndexConfig("graph"))
    with pytest.raises(InvalidOption, match="two queries"):
        choose_index(keys, normal(1, 16), IndexConfig())


@pytest.mark.parametrize("kind", ["ivf", "graph"])
def test_damaged_arrays_are_refused(kind: str) -> None:
    keys, queries = KeyVectors.create(normal(300, 16)), normal(200, 16)
    arrays = build_index(keys, CONFIG[kind], queries).arrays()
    for name in arrays:
        with pytest.raises(InvalidOption):
            load_index({n: a for n, a in arrays.items() if n != name}, keys, CONFIG[kind])
    name = "links" if kind == "graph" else "members"
    wild = arrays[name].copy()
    wild.reshape(-1)[0] = 299 + 5
    with pytest.raises(InvalidOption, match="do not fit together"):
        load_index({**arrays, name: wild}, keys, CONFIG[kind])
    with pytest.raises(InvalidOption, match="another segment"):
        load_index(arrays, KeyVectors.create(normal(200, 16)), CONFIG[kind])
    with pytest.raises(InvalidOption, match="not 'flat'"):
        load_index(arrays, keys, CONFIG["flat"])


@pytest.mark.parametrize("what", ["first start", "dims of means", "a member too few"])
def test_clusters_that_would_be_read_past_their_end_are_refused(what: str) -> None:
    keys = KeyVectors.create(normal(300, 16))
    arrays = build_index(keys, CONFIG["ivf"]).arrays()
    starts, means, members = (arrays[name].copy() for name in ("starts", "means", "members"))
    if what == "first start":
        starts[0] = -100
    elif what == "dims of means":
        means = means[:, :8]
    else:
        members, starts[-1] = members[:-1], starts[-1] - 1
    with pytest.raises(InvalidOption, match="do not fit together"):
        wrong = {"starts": starts, "means": means, "members": members}
        load_index({**arrays, **wrong}, keys, CONFIG["ivf"])


def test_where_no_index_over_narrow_keys_finds_enough_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # one dim is large in all keys, as it is in models: a byte leaves little for the others
    keys = normal(500, 16)
    keys[:, 3] += 500.0
    config = IndexConfig(keys="int8", top=20, degree=8)
    narrow = choose_index(KeyVectors.create(keys, "int8"), normal(100, 16), config)
    assert "no index over int8 keys reaches recall 0.95: the " in caplog.text
    assert max(trial.recall for trial in narrow.trials) < 0.95
    wide = choose_index(KeyVectors.create(keys), normal(100, 16), IndexConfig(top=20, degree=8))
    assert max(trial.recall for trial in wide.trials) == 1.0


@pytest.mark.parametrize(
    "options",
    [{"kind": "tree"}, {"per": "layer"}, {"keys": "int4"}, {"sample": 0.0}, {"degree": 0},
     {"sink": -1}, {"span": 4}],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_unknown_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        IndexConfig(**options)  # type: ignore[arg-type]


@KINDS
def test_a_search_that_can_not_be_is_refused(kind: str) -> None:
    keys, queries = normal(500, 16), normal(300, 16)
    index = build_index(KeyVectors.create(keys), CONFIG[kind], queries)
    for effort in (-1, -3, [8, -1, 8]):
        with pytest.raises(InvalidOption, match="effort of a search is at least 0, not -"):
            search_each([index] * 3, queries[:3], 5, effort=effort)
    with pytest.raises(InvalidOption, match="2 numbers as effort of 3 searches"):
        search_each([index] * 3, queries[:3], 5, effort=[8, 8])
    with pytest.raises(InvalidOption, match="2 numbers as count of 3 searches"):
        search_each([index] * 3, queries[:3], [5, 5])
    with pytest.raises(InvalidOption, match="3 queries in 2 indexes"):
        search_each([index] * 2, queries[:3], 5)
    values = KeyVectors.create(normal(500, 16))
    with pytest.raises(InvalidOption, match="values of 2 for 3 searches"):
        search_each([index] * 3, queries[:3], 5, values=[values] * 2)
    narrow = KeyVectors.create(normal(500, 8))
    with pytest.raises(InvalidOption, match="and 16 dims need equally many values"):
        search_each([index] * 3, queries[:3], 5, values=[narrow] * 3)


@KINDS
def test_any_effort_is_enough_for_a_hit_and_none_is_too_much(kind: str) -> None:
    keys, queries = normal(500, 16), normal(300, 16)
    index = build_index(KeyVectors.create(keys), CONFIG[kind], queries)
    assert (search(index, queries[:9], 5, effort=0).ids >= 0).any(1).all()
    # memory and time for as many as were asked for would end the test
    hits = search(index, queries[:9], 5, effort=1 << 40)
    assert recall_of(hits, nearest_keys(queries[:9], keys, 5)) == 1.0


@pytest.mark.parametrize("recall", [0.95, 1.0])
def test_keys_of_which_no_index_finds_enough_have_the_one_that_finds_most(recall: float) -> None:
    """Eight bits say nothing of the dims that matter, beside a dim that is the same for all."""
    keys, queries = normal(400, 16), normal(60, 16)
    keys[:, 0], queries[:, 0] = 1e4, 0.0
    config = IndexConfig(keys="int8", recall=recall, top=10)
    choice = choose_index(KeyVectors.create(keys, "int8"), queries, config)
    assert all(trial.recall < recall for trial in choice.trials)
    most = max(choice.trials, key=lambda trial: trial.recall)
    assert choice.index.config.kind == most.kind
