"""Who reads which pages together: the spans of all rows of a decode step, grouped into work items.

Rows share an item when they read the same physical pages, whatever their offsets: a document at
different places, a common system prompt, a forest of prefixes. Pages are shared physically only
when their content and context are the same, so page numbers are all that must be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ReadSpan:
    """What one row reads of one segment or run: ``length`` keys in ``pages``, standing at
    ``offset`` (Δ).

    The first ``sharable`` pages never change while the row lives, so other rows may hold them too.
    """

    pages: Sequence[int]
    offset: int
    length: int
    sharable: int


@dataclass(frozen=True)
class DecodeRow:
    """One query row: its position and the spans it reads, each wholly visible to it."""

    position: int
    spans: tuple[ReadSpan, ...]


class Entry(NamedTuple):
    """One row of an item: Δ, and the frame position before which keys are visible."""

    row: int
    offset: int
    bound: int


@dataclass(frozen=True)
class Item:
    """A run of pages, ``first_page`` pages into their segment, and the rows that read it."""

    pages: Sequence[int]
    first_page: int
    entries: list[Entry]


class _Reader(NamedTuple):
    row: int
    span: ReadSpan


def group_rows(rows: Sequence[DecodeRow], *, grouping: bool) -> list[Item]:
    """The work items of a step. Without ``grouping`` each (row, span) is an item of its own."""
    items: list[Item] = []
    by_first_page: dict[int, list[_Reader]] = {}
    for index, row in enumerate(rows):
        for span in row.spans:
            if span.length == 0:
                continue
            if grouping and span.sharable:
                by_first_page.setdefault(span.pages[0], []).append(_Reader(index, span))
            else:
                items.append(_private_item(_Reader(index, span), 0))
    for readers in by_first_page.values():
        _split_forest(readers, 0, items)
    return items


def _private_item(reader: _Reader, start: int) -> Item:
    span = reader.span
    entry = Entry(reader.row, span.offset, span.length)
    return Item(span.pages[start:] if start else span.pages, start, [entry])


def _split_forest(readers: list[_Reader], start: int, items: list[Item]) -> None:
    """Items for ``readers``, who agree on all pages before ``start``: the stretch they share, then
    the rest.
    """
    if len(readers) == 1:
        items.append(_private_item(readers[0], start))
        return
    stop = _common_prefix(readers, start)
    if stop > start:
        entries = [Entry(r.row, r.span.offset, r.span.length) for r in readers]
        items.append(Item(readers[0].span.pages[start:stop], start, entries))
    branches: dict[int, list[_Reader]] = {}
    for reader in readers:
        if len(reader.span.pages) <= stop:
            continue
        if stop < reader.span.sharable:
            branches.setdefault(reader.span.pages[stop], []).append(reader)
        else:
            items.append(_private_item(reader, stop))
    for branch in branches.values():
        _split_forest(branch, stop, items)


def _common_prefix(readers: list[_Reader], start: int) -> int:
    """The page index up to which all readers hold the same sharable pages."""
    first = readers[0].span
    if all(r.span.pages is first.pages and r.span.sharable == first.sharable for r in readers):
        return first.sharable
    limit = min(r.span.sharable for r in readers)
    for other in readers[1:]:
        pages = other.span.pages
        if pages[start:limit] != first.pages[start:limit]:
            limit = next(n for n in range(start, limit) if pages[n] != first.pages[n])
    return limit
