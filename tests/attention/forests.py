"""Random decode steps as the engine makes them: a forest of text prefixes, documents, tails."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from looseleaf.attention.plan.groups import DecodeRow, Item, ReadSpan, group_rows, tail_items

PAGE_SIZE = 16


class RowRecipe(NamedTuple):
    """A row: the paths of its lead and tail through the tree of prefixes, its documents in order,
    and unused slots."""

    path: list[int]
    own_pages: int
    documents: list[int]
    tail_path: list[int]
    unused: int


class StepRecipe(NamedTuple):
    """Documents by length, and rows."""

    document_lengths: list[int]
    rows: list[RowRecipe]


UNUSED = st.integers(0, PAGE_SIZE - 1)
ROWS = st.builds(
    RowRecipe,
    path=st.lists(st.integers(0, 1), max_size=3),
    own_pages=st.integers(0, 1),
    documents=st.lists(st.integers(0, 2), max_size=4),
    tail_path=st.lists(st.integers(2, 3), max_size=2),
    unused=UNUSED,
)
STEPS = st.builds(
    StepRecipe,
    document_lengths=st.lists(st.integers(1, 3 * PAGE_SIZE), min_size=3, max_size=3),
    rows=st.lists(ROWS, min_size=1, max_size=6),
)


@dataclass
class Forest:
    """Hands out page numbers; the same prefix path is the same pages."""

    next_page: int = 0
    prefix_pages: dict[tuple[int, ...], int] = field(default_factory=dict)

    def fresh(self, count: int) -> list[int]:
        first, self.next_page = self.next_page, self.next_page + count
        return list(range(first, self.next_page))

    def text(self, path: list[int], own_pages: int, offset: int, unused: int) -> ReadSpan:
        """A run that begins with the pages of ``path``; its last own page is partly used."""
        shared = []
        for n in range(len(path)):
            prefix = tuple(path[: n + 1])
            if prefix not in self.prefix_pages:
                self.prefix_pages[prefix] = self.fresh(1)[0]
            shared.append(self.prefix_pages[prefix])
        length = (len(shared) + own_pages) * PAGE_SIZE - (unused if own_pages else 0)
        return ReadSpan([*shared, *self.fresh(own_pages)], offset, length, len(shared))


def spans_of(row: DecodeRow) -> tuple[ReadSpan, ...]:
    """All that a row reads."""
    return (*(span for span in row.settled if span.length), row.tail)


def items_of(rows: list[DecodeRow], *, grouping: bool) -> list[Item]:
    """The items of a whole step."""
    groups = group_rows(rows, grouping=grouping)
    return [*groups.items, *tail_items(rows, groups)]


def decode_rows(step: StepRecipe) -> list[DecodeRow]:
    """The rows of a recipe: a lead, documents wherever they come to stand, a tail of their own."""
    forest, rows = Forest(), []
    documents = [
        (tuple(forest.fresh(-(-length // PAGE_SIZE))), length) for length in step.document_lengths
    ]
    for recipe in step.rows:
        lead = forest.text(recipe.path, recipe.own_pages, 0, recipe.unused)
        spans, end = [lead], lead.length
        for number in recipe.documents:
            pages, length = documents[number]
            spans.append(ReadSpan(pages, end, length, len(pages)))
            end += length
        tail = forest.text(recipe.tail_path, 1, end, recipe.unused)
        rows.append(DecodeRow(end + tail.length - 1, tuple(spans), tail))
    return rows
