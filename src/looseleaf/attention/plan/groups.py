"""Grouping of decode rows: spans that several rows share become one work item.

Rows share an item when they read the same physical pages, at any offsets: a document at different
positions, a common system prompt, a forest of prefixes. Pages are shared physically only if content
and context are equal, so comparing page numbers suffices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from looseleaf.index.host.attend import HostedRead
from looseleaf.index.host.window import WindowRow

Bitmap = npt.NDArray[np.int32]
"""One bit a frame position, 32 to a word; a set bit hides the key at that position."""


Positions = Sequence[int] | npt.NDArray[np.int64]
"""Positions of rows or keys, ascending."""


def join_bitmaps(
    bitmaps: Sequence[Bitmap | None],
) -> tuple[list[int], npt.NDArray[np.integer[Any]]]:
    """The start of each bitmap in the joined words, -1 for None, and the words; equal objects are
    stored once."""
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
    """One row's read of one segment or run: ``length`` keys in ``pages``, at ``offset`` (Δ).

    The first ``sharable`` pages never change while the row lives, so other rows may read them too.
    Keys in ``hidden`` are replaced, for this row only. A patch has ``places``: its keys' positions,
    ascending, equal to the pool's ``slot_positions``; it is in frame 0 and not sharable.
    """

    pages: Sequence[int]
    offset: int
    length: int
    sharable: int
    hidden: Bitmap | None = None
    places: Positions | None = None

    @property
    def bound(self) -> int:
        """The first frame position after its keys."""
        return self.length if self.places is None else int(self.places[-1]) + 1


@dataclass(frozen=True)
class DecodeRow:
    """One query row: its position, the settled spans before its tail, and the tail.

    ``settled`` and the tail's ``pages`` are the same objects at every step of the row's life, so a
    grouping can be cached between steps; the tail grows. All their keys are visible to the row.
    ``hosted`` are its reads outside of the pool. In a ``window`` past rows read the keys that the
    newest row finds there.
    """

    position: int
    settled: tuple[ReadSpan, ...]
    tail: ReadSpan
    hosted: tuple[HostedRead, ...] = field(default=(), kw_only=True)
    window: WindowRow | None = field(default=None, kw_only=True)

    @property
    def replays(self) -> bool:
        """Whether the device can fill the work list of the row."""
        return True


class Entry(NamedTuple):
    """One row of an item: Δ, the frame position before which keys are visible, and the hidden keys
    among them."""

    row: int
    offset: int
    bound: int
    hidden: Bitmap | None = None


@dataclass(frozen=True)
class Item:
    """A run of pages, ``first_page`` pages into their segment, and the rows that read it.

    Keys of an ``explicit`` item are at the pool's ``slot_positions``.
    """

    pages: Sequence[int]
    first_page: int
    entries: list[Entry]
    explicit: bool = False


@dataclass(eq=False)
class Groups:
    """Items of settled spans and of common tail pages; a row reads its tail alone from page
    ``tail_starts[row]`` on. ``refused`` counts common stretches that rows read separately.
    """

    items: list[Item]
    tail_starts: list[int]
    refused: int = 0


class _Reader(NamedTuple):
    row: int
    span: ReadSpan
    is_tail: bool


Worth = Callable[[int, int], bool]
"""Whether ``(rows, pages)``: rows with common pages, are faster read together."""


def group_rows(
    rows: Sequence[DecodeRow], *, grouping: bool, worth: Worth | None = None, step: int = 1
) -> Groups:
    """The groups of a step. Without ``grouping`` each (row, span) is an item of its own.

    Common pages form an item if ``worth`` agrees or is None; stretches end at multiples of ``step``
    pages.
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
    """The tail pages that each row reads alone: at least its own newest key."""
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
    """Splits readers along their common prefixes into items."""

    groups: Groups
    worth: Worth | None
    step: int

    def split(self, readers: list[_Reader], start: int) -> None:
        """Items for ``readers``, which share all pages before ``start``."""
        # an explicit stack: prefixes may branch deeper than calls may nest
        stack = [(readers, start)]
        while stack:
            stack += reversed(self._branches(*stack.pop()))

    def _branches(self, readers: list[_Reader], start: int) -> list[tuple[list[_Reader], int]]:
        """Add an item for the stretch that ``readers`` share; returns groups that share more."""
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
            # a subset may share more, and reads this stretch with it
            self.groups.refused += 1
        branches: dict[int, list[_Reader]] = {}
        for reader in readers:
            if common < reader.span.sharable:
                branches.setdefault(reader.span.pages[common], []).append(reader)
            else:
                self._leave(reader, start)
        return [(branch, start) for branch in branches.values()]

    def _leave(self, reader: _Reader, start: int) -> None:
        """The reader reads alone from page ``start`` on."""
        if reader.is_tail:
            self.groups.tail_starts[reader.row] = start
        elif start < len(reader.span.pages):
            self.groups.items.append(_alone(reader, start))


def _common_prefix(readers: list[_Reader], start: int) -> int:
    """The page index up to which all readers have the same sharable pages."""
    first = readers[0].span
    if all(r.span.pages is first.pages and r.span.sharable == first.sharable for r in readers):
        return first.sharable
    limit = min(r.span.sharable for r in readers)
    for other in readers[1:]:
        pages = other.span.pages
        if pages[start:limit] != first.pages[start:limit]:
            limit = next(n for n in range(start, limit) if pages[n] != first.pages[n])
    return limit
