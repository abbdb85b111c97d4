"""The page pool: each page has one owner or is free."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.errors import IntegrityError, InvalidOption
from looseleaf.kv.pool import PagePool


def make_pool(num_pages: int, page_size: int = 16) -> PagePool:
    return PagePool(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@given(counts=st.lists(st.integers(0, 6), max_size=8))
def test_allocation_takes_all_or_nothing_and_no_page_twice(counts: list[int]) -> None:
    pool, held = make_pool(10), []
    for count in counts:
        free = pool.num_free
        pages = pool.allocate(count)
        assert (pages is None) == (count > free)
        assert pool.num_free == free - len(pages or [])
        held += pages or []
        pool.check(held)
    pool.free(held)
    pool.check([])
    assert pool.num_free == 10


def test_a_run_that_is_freed_and_taken_again_keeps_its_order() -> None:
    pool = make_pool(8)
    run = pool.allocate(5)
    assert run is not None
    pool.free(run)
    assert pool.allocate(5) == run


@given(taken=st.lists(st.booleans(), min_size=1, max_size=60), count=st.integers(1, 20))
def test_a_run_is_the_lowest_with_room_before_it_if_there_is_one(
    taken: list[bool], count: int
) -> None:
    pool = make_pool(len(taken))
    everything = pool.allocate(len(taken)) or []
    pool.free(page for page in everything if not taken[page])

    def free(start: int, length: int) -> bool:
        return start + length <= len(taken) and not any(taken[start : start + length])

    # a few pages after the preceding run stay free for its growth
    starts = range(len(taken))
    roomy = [s + 8 if s else 0 for s in starts if free(s, count + 8 if s else count)]
    tight = [s for s in starts if free(s, count)]
    expected = (roomy or tight or [None])[0]
    pages = pool.allocate(count)
    if expected is not None:
        assert pages == list(range(expected, expected + count))
    elif pages is not None:
        assert pages == [page for page in starts if not taken[page]][:count]


def test_a_page_to_grow_into_is_the_neighbour_if_that_is_free() -> None:
    pool = make_pool(8)
    run = pool.allocate(3)
    assert run is not None
    assert pool.allocate_next(run[-1]) == [run[-1] + 1]
    other = pool.allocate_next(run[-1])
    assert other is not None
    assert other[0] not in [*run, run[-1] + 1]
    while pool.num_free:
        pool.allocate(1)
    assert pool.allocate_next(run[-1]) is None


def test_pages_start_as_zeros_and_a_layer_is_a_view() -> None:
    pool = make_pool(3)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (3, 1, 16, 4)
    assert not pool.kv.any()
    keys[2] = 1.0
    assert pool.kv[1, 0, 2].all()
    assert pool.kv.count_nonzero() == 16 * 4
    assert pool.bytes_per_page == 2 * 2 * 16 * 4 * 4


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(InvalidOption, match="at least one page"):
        make_pool(0)


def test_freeing_a_page_twice_is_noticed() -> None:
    pool = make_pool(4)
    pages = pool.allocate(2)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(pages[:1])


@pytest.mark.parametrize(
    ("owned", "message"),
    [([0, 0, 1], "two owners"), ([0, 1, 2], "two owners"), ([0], "lost")],
)
def test_books_that_do_not_balance_are_noticed(owned: list[int], message: str) -> None:
    pool = make_pool(4)
    assert pool.allocate(2) == [0, 1]
    pool.check([1, 0])
    with pytest.raises(IntegrityError, match=message):
        pool.check(owned)
