"""A budget over layers: nothing is lost, a larger one takes from nobody, dense layers have none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import Select
from looseleaf.config import LayerBudgets
from looseleaf.errors import InvalidOption
from looseleaf.sparse import Budget, Quest, Schedule, SparsePolicy

MANY = 12
WEIGHTS = st.lists(st.floats(0.01, 50.0), min_size=MANY, max_size=MANY).map(tuple)
BUDGETS = st.one_of(st.sampled_from(["flat", "pyramid"]), WEIGHTS)
DENSE = st.sets(st.integers(0, MANY - 1), max_size=MANY - 1).map(frozenset)


@settings(max_examples=60)
@given(budgets=BUDGETS, dense=DENSE, most=st.integers(1, 90))
def test_layers_together_get_the_budget_to_the_unit(
    budgets: LayerBudgets, dense: frozenset[int], most: int
) -> None:
    schedule, before = Schedule(budgets, dense), [0] * MANY
    for count in range(0, most + 1, 1 + most // 9):
        counts = schedule.spread(count, most, MANY)
        choosing = [n for n in range(MANY) if n not in schedule.dense_layers]
        assert sum(counts) == sum(counts[n] for n in choosing) == count * len(choosing)
        assert all(0 <= own <= most for own in counts)
        assert all(own >= less for own, less in zip(counts, before, strict=True))
        before = counts
    assert schedule.spread(most + 5, most, MANY) == [
        0 if n in schedule.dense_layers else most for n in range(MANY)
    ]


@settings(max_examples=30)
@given(count=st.integers(0, 300))
def test_a_pyramid_falls_evenly_to_a_twentieth_of_the_mean(count: int) -> None:
    """PyramidKV's sequence, each member rounded."""
    counts = Schedule("pyramid").spread(count, 10_000, MANY)
    assert counts == sorted(counts, reverse=True)
    step = 1.9 * count / (MANY - 1)
    for layer, own in enumerate(counts):
        assert abs(own - (1.95 * count - layer * step)) <= 1


def test_what_a_layer_can_not_use_goes_to_the_others() -> None:
    assert Schedule((8.0, 1.0, 1.0)).spread(5, 8, 3) == [8, 4, 3]


def test_weights_that_are_equal_are_a_flat_budget() -> None:
    assert Schedule((2.0,) * MANY).spread(7, 50, MANY) == Schedule().spread(7, 50, MANY)


def test_what_is_read_in_any_case_is_read_in_every_layer() -> None:
    budget = Budget(pages=10, sink=1, recent=2)
    policy = SparsePolicy(Quest(), budget, frozenset({0}), layer_budgets="pyramid")
    # of ten pages one is being written, and the first and one more are forced: seven are spread
    limits = policy.layer_limits(40, 1, 5)
    assert sum(limits[1:]) == 4 * 9
    assert limits[4] == 2 and limits[1] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "all", "layer_budgets": "pyramid"}, "does not use layer_budgets"),
        ({"policy": "snapkv", "layer_budgets": "pyramid"}, "a page has all layers"),
        ({"policy": "snapkv", "mass": 0.5}, "does not estimate a mass"),
        ({"policy": "tova", "dense_layers": (1,)}, "does not use dense_layers"),
        ({"policy": "retrieval", "recall_every": 2, "sink": 9}, "use sink, recall_every"),
        ({"policy": "window", "group": "sum"}, "does not use group"),
        ({"mass": 0.5, "layer_budgets": "pyramid"}, "distribute tokens or ratio"),
        ({"layer_budgets": ()}, "a weight for every layer"),
        ({"layer_budgets": (1.0, 0.0)}, "positive"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Select(**options)  # type: ignore[arg-type]
