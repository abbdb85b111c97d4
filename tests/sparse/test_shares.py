"""How many tokens or pages a share is."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.config import Select, share_of
from looseleaf.sparse import Budget
from looseleaf.sparse.evictors import Tova, make_evictor


@given(st.integers(1, 1000), st.integers(1, 2000))
def test_a_share_in_thousandths_is_rounded_up_as_it_is_written(share: int, number: int) -> None:
    exact = Fraction(share, 1000) * number
    assert share_of(share / 1000, number) == -(-exact.numerator // exact.denominator)


@pytest.mark.parametrize(("ratio", "number", "kept"), [(0.07, 100, 7), (0.55, 100, 55)])
def test_pages_and_keys_are_counted_by_the_same_rule(ratio: float, number: int, kept: int) -> None:
    assert Budget(ratio=ratio).limit(number, 0) == kept
    evictor = make_evictor(Select("tova", ratio=ratio), number)
    assert isinstance(evictor, Tova) and evictor.capacity == kept
