"""Items cut so that all programs read equally much: nothing is lost, and nobody has much more."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.attention.plan.cuts import equal_shares
from looseleaf.attention.plan.groups import Entry, Item
from looseleaf.attention.plan.lists import FlatItems, int32

ITEMS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), min_size=1, max_size=12)


def flat_items(items: list[tuple[int, int]]) -> FlatItems:
    """Items of so many pages and entries, all pages different."""
    made, page, row = [], 0, 0
    for pages, entries in items:
        read = [Entry(row + n, 0, 16 * pages) for n in range(entries)]
        made.append(Item(range(page, page + pages), 0, read))
        page, row = page + pages, row + entries
    return FlatItems.create(made, [int32(item.pages) for item in made])


@given(ITEMS, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_shares_are_equal_and_lose_nothing(
    items: list[tuple[int, int]], programs: int, step: int, left_out: int
) -> None:
    flat = flat_items(items)
    chosen = np.arange(len(items)) >= left_out
    shares = equal_shares(flat, chosen, programs, step)
    total = int(flat.num_pages[chosen].sum())
    if not total or total < programs * step:
        assert shares is None
        return
    assert shares is not None
    pieces, turns = shares
    lengths = pieces.stop_page - pieces.first_page
    counts = pieces.stop_entry - pieces.first_entry
    # every entry reads every page of its item once, and a turn without pages has no entry
    read = [
        (int(item), page, entry)
        for item, a, b, c, d in zip(*pieces, strict=True)
        for page in range(a, b)
        for entry in range(c, d)
    ]
    wanted = [
        (n, page, entry)
        for n, (pages, entries) in enumerate(items)
        if chosen[n]
        for page in range(pages)
        for entry in range(entries)
    ]
    assert sorted(read) == wanted
    assert ((lengths > 0) == (counts > 0)).all()
    # a program takes every so-manieth piece; it ends within half a step of where it should
    loads = [int(lengths[n::programs].sum()) for n in range(programs)]
    assert max(abs(load - total / programs) for load in loads) <= step + 1
    assert turns == max(int(np.flatnonzero(counts).max()) // programs + 1, 1)


def test_an_item_without_pages_is_left_to_others() -> None:
    flat = FlatItems.create([Item([], 0, [Entry(0, 0, 0)])], [int32([])])
    assert equal_shares(flat, np.ones(1, np.bool_), 2, 1) is None
