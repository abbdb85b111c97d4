"""Contexts that are read whole because that is faster: how long they may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf import Select
from looseleaf.attention.plan.cost_model import default_cost_model
from looseleaf.sparse import BreakEven, make_policy

PAGE = 16
EVEN = BreakEven.of(default_cost_model(128, 2, 132, hopper=True), 8, PAGE)


def length(select: Select, window: int = 1, even: BreakEven = EVEN) -> int:
    policy = make_policy(select, PAGE)
    assert policy is not None
    return even.tokens(select, policy, window)


def test_of_an_8b_model_on_an_h200_it_is_what_was_measured() -> None:
    """Choosing 2,048 tokens was slower than reading 8,176 and faster than reading 32,640."""
    assert 8_176 < length(Select("quest", tokens=2048)) < 32_640


@given(tokens=st.integers(1, 10**6), more=st.integers(0, 10**6), window=st.integers(1, 8))
def test_a_larger_budget_or_window_never_pays_sooner(tokens: int, more: int, window: int) -> None:
    small = length(Select("quest", tokens=tokens), window)
    assert tokens < small <= length(Select("quest", tokens=tokens + more), window)
    assert small <= length(Select("quest", tokens=tokens), window + 1)


@given(ratio=st.floats(0.01, 1.0))
def test_a_share_that_leaves_nothing_to_save_never_pays(ratio: float) -> None:
    """Of sixteen keys Quest looks at two vectors, a sixteenth of keys and values."""
    never = length(Select("quest", ratio=ratio)) == length(Select("quest", ratio=1.0))
    assert never == (ratio >= 1 - 1 / 16 or never)
    assert not never or ratio > 0.9


def test_slow_memory_makes_choosing_pay_sooner() -> None:
    slow = BreakEven(EVEN.per_key * 10, PAGE)
    select = Select("quest", tokens=512)
    assert length(select, even=slow) < length(select) / 4


@pytest.mark.parametrize(
    "select",
    [Select("window", tokens=64), Select("partial", tokens=64), Select("quest", mass=0.9)],
)
def test_what_is_not_chosen_by_kernels_is_chosen_from_the_first_token_on(select: Select) -> None:
    assert length(select) == 0
