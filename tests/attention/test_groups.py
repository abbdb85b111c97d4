"""Grouping decides who reads together, never who reads what."""

from collections import Counter

from hypothesis import given

from looseleaf.attention.plan.groups import DecodeRow, Entry, Item, ReadSpan, group_rows
from tests.attention.forests import STEPS, StepRecipe, decode_rows, items_of, spans_of

Reading = tuple[int, int, int, int, int]


def readings(items: list[Item]) -> Counter[Reading]:
    """How often each row reads each page, standing where, up to which bound."""
    return Counter(
        (entry.row, page, item.first_page + n, entry.offset, entry.bound)
        for item in items
        for n, page in enumerate(item.pages)
        for entry in item.entries
    )


def stated(rows: list[DecodeRow]) -> Counter[Reading]:
    return Counter(
        (index, page, n, span.offset, span.length)
        for index, row in enumerate(rows)
        for span in spans_of(row)
        for n, page in enumerate(span.pages)
    )


@given(step=STEPS)
def test_items_cover_every_row_and_page_exactly_once_grouped_or_not(step: StepRecipe) -> None:
    rows = decode_rows(step)
    for grouping in (True, False):
        items = items_of(rows, grouping=grouping)
        assert readings(items) == stated(rows)
        assert all(item.pages and item.entries for item in items)


@given(step=STEPS)
def test_whoever_may_share_a_page_reads_it_in_one_item(step: StepRecipe) -> None:
    rows = decode_rows(step)
    sharers: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for span in spans_of(row):
            for page in span.pages[: span.sharable]:
                sharers.setdefault(page, []).append(index)
    items = items_of(rows, grouping=True)
    for page, expected in sharers.items():
        together = [sorted(e.row for e in item.entries) for item in items if page in item.pages]
        assert together == [sorted(expected)]


@given(step=STEPS)
def test_without_grouping_every_item_has_one_row_and_a_whole_span(step: StepRecipe) -> None:
    rows = decode_rows(step)
    items = items_of(rows, grouping=False)
    assert [len(item.entries) for item in items] == [1] * len(items)
    assert len(items) == sum(len(spans_of(row)) for row in rows)


@given(step=STEPS)
def test_the_end_of_a_tail_is_read_by_its_own_row_alone(step: StepRecipe) -> None:
    rows = decode_rows(step)
    starts = group_rows(rows, grouping=True).tail_starts
    assert all(start <= row.tail.sharable for row, start in zip(rows, starts, strict=True))


def own(page: int) -> ReadSpan:
    return ReadSpan([page], 60, 3, 0)


def test_a_document_at_different_offsets_is_one_item_with_an_offset_a_row() -> None:
    document = (4, 5)
    rows = [
        DecodeRow(62, (ReadSpan(document, offset, 20, 2),), own(10 + offset))
        for offset in (7, 0, 23)
    ]
    assert group_rows(rows, grouping=True).items == [
        Item(document, 0, [Entry(0, 7, 20), Entry(1, 0, 20), Entry(2, 23, 20)])
    ]


def test_a_document_twice_in_one_prompt_is_one_item_with_two_entries_of_the_row() -> None:
    row = DecodeRow(62, (ReadSpan((1,), 0, 9, 1), ReadSpan((1,), 30, 9, 1)), own(2))
    assert group_rows([row], grouping=True).items == [
        Item((1,), 0, [Entry(0, 0, 9), Entry(0, 30, 9)])
    ]


def test_a_forest_splits_where_its_branches_part() -> None:
    tails = [
        ReadSpan([1, 2, 3, 10], 0, 64, 3),
        ReadSpan([1, 2, 4, 11], 0, 64, 3),
        ReadSpan([1, 2, 4, 12], 0, 64, 3),
        ReadSpan([1, 13], 0, 32, 1),
    ]
    rows = [DecodeRow(tail.length - 1, (), tail) for tail in tails]
    items = {
        (tuple(item.pages), item.first_page): [entry.row for entry in item.entries]
        for item in items_of(rows, grouping=True)
    }
    assert items == {
        ((1,), 0): [0, 1, 2, 3],
        ((2,), 1): [0, 1, 2],
        ((3, 10), 2): [0],
        ((4,), 2): [1, 2],
        ((11,), 3): [1],
        ((12,), 3): [2],
        ((13,), 1): [3],
    }


def test_pages_that_may_still_change_are_never_shared() -> None:
    rows = [DecodeRow(9, (ReadSpan([1], 0, 7, 0),), ReadSpan([2], 7, 3, 0)) for _ in range(2)]
    items = items_of(rows, grouping=True)
    assert [len(item.entries) for item in items] == [1] * 4


def test_a_prefix_may_branch_once_a_row() -> None:
    # each row goes on where the one before ends: a forest as deep as there are rows
    pages = tuple(range(1060))
    rows = [
        DecodeRow(16 * n, (ReadSpan(pages[:n], 0, 16 * n, n),), ReadSpan((5000 + n,), 16 * n, 1, 0))
        for n in range(1, 1060)
    ]
    items = group_rows(rows, grouping=True).items
    assert readings(items) == Counter(
        (row, page, page, 0, 16 * row + 16) for row in range(len(rows)) for page in range(row + 1)
    )
