"""Who reads which pages together: the spans of all rows of a decode step, grouped into work items.

Rows share an item when they read the same physical pages, whatever their offsets: a document at
different places, a common system prompt, a forest of prefixes. Pages are shared physically only
when their content and context are the same, so page numbers are all that must be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from looseleaf.attention.host.attend import HostedRead
from looseleaf.attention.host.window import WindowRow

Bitmap = npt.NDArray[np.int32]
"""One bit a frame position, 32 to a word; a set bit hides the key that stands there."""


Positions = Sequence[int] | npt.NDArray[np.int64]
"""Where rows or keys stand, rising."""


def join_bitmaps(
    bitmaps: Sequence[Bitmap | None],
) -> tuple[list[int], npt.NDArray[np.integer[Any]]]:
    """Where each bitmap begins in the words of all, -1 for none; one that comes twice stands
    once.
    """
    starts: dict[int, int] = {}
    words: list[Bitmap] = []
    end = 0
    for bitmap in bitmaps:
        if bitmap is not None and id(bitmap) not in starts:
            starts[id(bitmap)] = end
            words.append(bitmap)
            end += len(bitmap)
    masks = [-1 if bitmap is None else starts[id(bitmap)] for bitmap in bitmaps]
    return masks, np.concatenate(words) if words else np.zeros(0, np.int32)


@dataclass(frozen=True)
class ReadSpan:
    """What one row reads of one segment or run: ``length`` keys in ``pages``, standing at
    ``offset`` (Δ).

    The first ``sharable`` pages never change while the row lives, so other rows may hold them too.
    Keys in ``hidden`` are replaced, for this row only. A patch has ``places``: where its keys truly
    stand, rising, as the pool's ``slot_positions`` say too; it is in frame 0 and not sharable.
    """

    pages: Sequence[int]
    offset: int
    length: int
    sharable: int
    hidden: Bitmap | None = None
    places: Positions | None = None

    @property
    def bound(self) -> int:
        """The frame position before which its keys stand."""
        return self.length if self.places is None else int(self.places[-1]) + 1


@dataclass(frozen=True)
class DecodeRow:
    """One query row: its position, the settled spans before its tail, and the tail.

    ``settled`` and the tail's ``pages`` are the same objects at every step of the row's life, so
    that a grouping can be kept from step to step; the tail grows. All of both is visible to the
    row. ``hosted`` is what it reads besides, outside of the pool; in a ``window`` past rows read
    what the newest finds there.
    """

    position: int
    settled: tuple[ReadSpan, ...]
    tail: ReadSpan
    hosted: tuple[HostedRead, ...] = field(default=(), kw_only=True)
    window: WindowRow | None = field(default=None, kw_only=True)


class Entry(NamedTuple):
    """One row of an item: Δ, the frame position before which keys are visible, and which of them
    are hidden all the same.
    """

    row: int
    offset: int
    bound: int
    hidden: Bitmap | None = None


@dataclass(frozen=True)
class Item:
    """A run of pages, ``first_page`` pages into their segment, and the rows that read it.

    The keys of an ``explicit`` one stand where the pool's ``slot_positions`` say.
    """

    pages: Sequence[int]
    first_page: int
    entries: list[Entry]
    explicit: bool = False


@dataclass(eq=False)
class Groups:
    """Items of settled spans and of what tails have in common; ``tail_starts[row]`` is the page
    from which a row reads its tail alone. ``refused`` counts stretches that rows have in common
    and read alone all the same.
    """

    items: list[Item]
    tail_starts: list[int]
    refused: int = 0


class _Reader(NamedTuple):
    row: int
    span: ReadSpan
    is_tail: bool


Worth = Callable[[int, int], bool]
"""Whether so many rows had better read so many common pages together."""


def group_rows(
    rows: Sequence[DecodeRow], *, grouping: bool, worth: Worth | None = None, step: int = 1
) -> Groups:
    """The groups of a step. Without ``grouping`` each (row, span) is an item of its own.

    Common pages are read together where that is ``worth`` it (always, without an opinion), in
    stretches that end at multiples of ``step`` pages.
    """
    groups = Groups([], [0] * len(rows))
    by_first_page: dict[int, list[_Reader]] = {}
    for index, row in enumerate(rows):
        readers = [_Reader(index, span, False) for span in row.settled if span.length]
        readers.append(_Reader(index, row.tail, True))
        for reader in readers:
            if grouping and reader.span.sharable:
                by_first_page.setdefault(reader.span.pages[0], []).append(reader)
            elif not reader.is_tail:
                groups.items.append(_alone(reader, 0))
    forest = _Forest(groups, worth, step)
    for readers in by_first_page.values():
        forest.split(readers, 0)
    return groups


def tail_items(rows: Sequence[DecodeRow], groups: Groups) -> list[Item]:
    """What each row reads alone of its tail: at least its own newest key."""
    return [
        _alone(_Reader(index, row.tail, True), start)
        for index, (row, start) in enumerate(zip(rows, groups.tail_starts, strict=True))
    ]


def _alone(reader: _Reader, start: int) -> Item:
    span = reader.span
    pages = span.pages[start:] if start else span.pages
    return Item(pages, start, [_entry(reader)], explicit=span.places is not None)


def _entry(reader: _Reader) -> Entry:
    span = reader.span
    return Entry(reader.row, span.offset, span.bound, span.hidden)


@dataclass(frozen=True)
class _Forest:
    """Walks down the stretches that readers have in common, and makes items of them."""

    groups: Groups
    worth: Worth | None
    step: int

    def split(self, readers: list[_Reader], start: int) -> None:
        """Items for ``readers``, who agree on all pages before ``start``: the stretch they share,
        then the rest."""
        # those who are still to be looked at: a prefix may branch more often than calls may nest
        left = [(readers, start)]
        while left:
            left += reversed(self._branches(*left.pop()))

    def _branches(self, readers: list[_Reader], start: int) -> list[tuple[list[_Reader], int]]:
        """An item of the stretch that ``readers`` share, and those who share more behind it."""
        if len(readers) == 1:
            self._leave(readers[0], start)
            return []
        common = _common_prefix(readers, start)
        stop = common // self.step * self.step
        if stop > start and (self.worth is None or self.worth(len(readers), stop - start)):
            entries = [_entry(reader) for reader in readers]
            pages = readers[0].span.pages[start:stop]
            self.groups.items.append(Item(pages, start, entries))
            start = stop
        else:
            # some of them may have more in common, and read this stretch along with it
            self.groups.refused += 1
        branches: dict[int, list[_Reader]] = {}
        for reader in readers:
            if common < reader.span.sharable:
                branches.setdefault(reader.span.pages[common], []).append(reader)
            else:
                self._leave(reader, start)
        return [(branch, start) for branch in branches.values()]

    def _leave(self, reader: _Reader, start: int) -> None:
        """From page ``start`` the reader is on its own."""
        if reader.is_tail:
            self.groups.tail_starts[reader.row] = start
        elif start < len(reader.span.pages):
            self.groups.items.append(_alone(reader, start))


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
