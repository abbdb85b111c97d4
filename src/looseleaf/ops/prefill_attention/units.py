"""The units in which the kernel of the Hopper generation reads a span list: its tiles, whole or in
parts.

Few tiles leave processors idle, so their keys are read in several parts at a time, each of which
leaves a state of its own, and the states of a row are merged (docs/ideas.md). A part holds whole
blocks of keys, counted over all spans that the rows of its tile may see, wherever spans begin and
end.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]

KEYS = 128
"""Keys of a block: a part begins and ends at a multiple of it from the first of a span."""
UNIT_NUMBERS = 8
"""Numbers of a unit: first row, rows, first and end span, the slot from which on its first span is
read and the one before which its last, state of its first row, states from a row to the next."""

# up to so many tiles are listed one by one
_FEW_TILES = 16


# a length is counted in so many steps a block, and a border of spans in whole steps
_STEPS = 4


@dataclass(frozen=True)
class UnitCosts:
    """What units cost, in microseconds: ``start`` each, ``per_block`` for a block of keys and
    ``border`` to go on from one span to the next, while ``programs`` are in flight; and a merge,
    ``launch`` and ``per_state`` for a row and KV head."""

    programs: int
    start: float
    per_block: float
    border: float
    launch: float
    per_state: float

    @property
    def border_steps(self) -> int:
        """A border as a part of a unit's length."""
        return round(_STEPS * self.border / self.per_block)

    def time(self, steps: int, num_states: int, num_heads: int) -> float:
        """How long units take that are in flight at the same time, of so many ``steps`` at most;
        they leave ``num_states`` states that are to be merged, or none."""
        time = self.start + self.per_block * steps / _STEPS
        return time + self.launch + self.per_state * num_states * num_heads if num_states else time


Part = tuple[int, int, int, int]
"""A stretch of what a tile reads: its first block and the one before which it ends, and which of
the tile's spans these are in."""


class TileReads:
    """What a tile reads: so many ``blocks`` of each span, one at least. A length is counted in
    steps, in which a border of spans is ``border``."""

    def __init__(self, blocks: Sequence[int], border: int) -> None:
        self.border = border
        self.ends = list(accumulate(blocks))
        firsts = (0, *self.ends[:-1])
        # what it takes from the tile's first block on to have read one of a span
        self._reached = [_STEPS * (at + 1) + border * n for n, at in enumerate(firsts)]

    @property
    def num_blocks(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def steps(self) -> int:
        """How long it is as a whole."""
        return self.length(self.whole())

    def length(self, part: Part) -> int:
        """How long a part of it is."""
        first, stop, begin, last = part
        return _STEPS * (stop - first) + self.border * (last - begin)

    def whole(self) -> Part:
        """All of it."""
        return 0, self.num_blocks, 0, max(0, len(self.ends) - 1)

    def parts(self, length: int) -> list[Part]:
        """All of it in parts as long as ``length`` lets them, which is that of a block or more."""
        ends, reached, border = self.ends, self._reached, self.border
        at, begin, total, parts = 0, 0, self.num_blocks, list[Part]()
        while at < total:
            most = _STEPS * at + border * begin + length
            last = bisect_right(reached, most) - 1
            stop = min(ends[last], (most - border * last) // _STEPS)
            parts.append((at, stop, begin, last))
            at, begin = stop, last + (stop == ends[last])
        return parts or [self.whole()]


def best_parts(
    tiles: Sequence[TileReads], rows: Sequence[int], num_heads: int, costs: UnitCosts
) -> list[list[Part]]:
    """The parts of each tile, so that all are read soonest: whole where they fill the device, else
    cut to one length, so that all parts are in flight at a time.

    Parts that wait for others cost more than they save, and one that crosses a border of spans has
    fewer blocks than one that does not (docs/log.md)."""
    whole, slots = [[tile.whole()] for tile in tiles], max(1, costs.programs // num_heads)
    if not 0 < len(tiles) < slots:
        return whole
    steps = [tile.steps for tile in tiles]
    length = _shortest(steps, slots)
    cut = [tile.parts(length) for tile in tiles]
    while sum(map(len, cut)) > slots:
        # what a part leaves of its length, less than a block and a border, was not counted
        length += _STEPS // 2
        cut = [tile.parts(length) for tile in tiles]
    if max(map(len, cut)) == 1:
        return whole
    states = sum(len(parts) * count for parts, count in zip(cut, rows, strict=True))
    sooner = costs.time(length, states, num_heads) < costs.time(max(steps), 0, num_heads)
    return cut if sooner else whole


def _shortest(steps: Sequence[int], most: int) -> int:
    """The least length that parts may have for there to be ``most`` parts at most, if they could
    end anywhere."""
    low, high = max(_STEPS, sum(steps) // most), max(_STEPS, *steps)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-one // middle) for one in steps) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def blocks_seen(arrays: Mapping[str, IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Of each tile of a span list and each span of its request, in order: the tile, the span, and
    in how many blocks the keys lie that rows of the tile may see."""
    request, indptr = arrays["tile_request"], arrays["request_span_indptr"]
    counts = (indptr[1:] - indptr[:-1])[request]
    tile = np.arange(len(request)).repeat(counts)
    span = np.arange(len(tile)) + (indptr[request] - (counts.cumsum() - counts)).repeat(counts)
    last = arrays["tile_row_indptr"][1:][tile] - 1
    before = arrays["row_positions"][last] - arrays["span_offset"][span] + 1
    slots = np.minimum(np.maximum(before, 0), arrays["span_length"][span])
    if "row_patch_bounds" in arrays:
        is_patch = arrays["span_explicit"][span] != 0
        slots = np.where(is_patch, arrays["row_patch_bounds"][last], slots)
    return tile, span, -(-slots // KEYS)


def _seen_by_few(arrays: Mapping[str, IntArray]) -> list[list[tuple[int, int]]]:
    """The same of few tiles, for each the spans of which it sees something and their blocks, one by
    one: before a first launch each call of numpy costs as much as some dozens of numbers."""
    indptr, rows = arrays["request_span_indptr"].tolist(), arrays["tile_row_indptr"][1:] - 1
    offsets, lengths = arrays["span_offset"].tolist(), arrays["span_length"].tolist()
    lasts, of_patch = arrays["row_positions"][rows].tolist(), [0] * len(rows)
    patches = [0] * len(lengths)
    if "row_patch_bounds" in arrays:
        of_patch, patches = (
            arrays["row_patch_bounds"][rows].tolist(),
            arrays["span_explicit"].tolist(),
        )
    seen = []
    for request, last, bound in zip(arrays["tile_request"].tolist(), lasts, of_patch, strict=True):
        of_tile = []
        for span in range(indptr[request], indptr[request + 1]):
            slots = bound if patches[span] else min(last - offsets[span] + 1, lengths[span])
            if slots > 0:
                of_tile.append((span, -(-slots // KEYS)))
        seen.append(of_tile)
    return seen


def _by_tile(
    seen: tuple[IntArray, IntArray, IntArray], num_tiles: int
) -> list[list[tuple[int, int]]]:
    """What `blocks_seen` tells as `_seen_by_few` does."""
    of_tiles: list[list[tuple[int, int]]] = [[] for _ in range(num_tiles)]
    for tile, span, blocks in zip(*(column.tolist() for column in seen), strict=True):
        if blocks:
            of_tiles[tile].append((span, blocks))
    return of_tiles


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """``num_units``, ``unit_numbers`` and ``row_state_indptr`` of the arrays of a span list, and
    how many states its units leave; 0 if every row has one only, which is its answer.

    Without ``costs`` tiles are read whole."""
    indptr, num_tiles = arrays["tile_row_indptr"], len(arrays["tile_request"])
    rows = indptr[1:] - indptr[:-1]
    few = num_tiles <= _FEW_TILES
    may_be_cut = costs is not None and num_tiles * num_heads < costs.programs
    if few or may_be_cut:
        of_tiles = _seen_by_few(arrays) if few else _by_tile(blocks_seen(arrays), num_tiles)
        border = costs.border_steps if costs is not None else 0
        tiles = [TileReads([blocks for _, blocks in of_tile], border) for of_tile in of_tiles]
        counts, parts = rows.tolist(), [[tile.whole()] for tile in tiles]
        if costs is not None and may_be_cut:
            parts = best_parts(tiles, counts, num_heads, costs)
        units = _listed(of_tiles, tiles, indptr.tolist(), parts)
        of_rows = chain.from_iterable(map(repeat, map(len, parts), counts))
        states = np.array([0, *accumulate(of_rows)], dtype=np.int32)
    else:
        units = _listed_at_once(blocks_seen(arrays), indptr)
        states = np.arange(int(indptr[-1]) + 1, dtype=np.int32)
    made = {
        "num_units": np.array([len(units)], dtype=np.int32),
        "unit_numbers": units.ravel(),
        "row_state_indptr": states,
    }
    return made, int(states[-1]) if len(units) > num_tiles else 0


def _listed(
    of_tiles: Sequence[Sequence[tuple[int, int]]],
    tiles: Sequence[TileReads],
    bounds: Sequence[int],
    parts: Sequence[Sequence[Part]],
) -> npt.NDArray[np.int32]:
    """The units of few tiles (spans and blocks of each), the longest first, one by one."""
    units, state = list[tuple[int, tuple[int, ...]]](), 0
    for of_tile, tile, (first, end), cut in zip(
        of_tiles, tiles, pairwise(bounds), parts, strict=True
    ):
        rows, ends, count = end - first, tile.ends, len(cut)
        for nth, (start, stop, begin, last) in enumerate(cut):
            read = 0, 0, 0, 0
            if start < stop:
                (span, blocks), (last_span, last_blocks) = of_tile[begin], of_tile[last]
                skip, before = start - ends[begin] + blocks, stop - ends[last] + last_blocks
                read = span, last_span + 1, skip * KEYS, before * KEYS
            units.append((start - stop, (first, rows, *read, state + nth, count)))
        state += rows * count
    units.sort(key=itemgetter(0))
    return np.array([numbers for _, numbers in units], dtype=np.int32)


def _listed_at_once(
    seen: tuple[IntArray, IntArray, IntArray], indptr: IntArray
) -> npt.NDArray[np.int32]:
    """The same of many tiles, all whole."""
    tile, span, blocks = seen
    num_tiles = len(indptr) - 1
    total = np.bincount(tile, blocks, num_tiles).astype(np.int64)
    read, place = blocks > 0, np.arange(len(tile))
    # which are the first and the last span of which a tile sees something
    begin, last = np.zeros(num_tiles, dtype=np.int64), np.full(num_tiles, -1, dtype=np.int64)
    begin[tile[read][::-1]] = place[read][::-1]
    last[tile[read]] = place[read]
    some = total > 0
    numbers = np.stack(
        (
            indptr[:-1], indptr[1:] - indptr[:-1],
            np.where(some, span[begin], 0), np.where(some, span[last] + 1, 0),
            np.zeros(num_tiles, dtype=np.int64), np.where(some, blocks[last] * KEYS, 0),
            indptr[:-1], np.ones(num_tiles, dtype=np.int64),
        ),
        axis=1,
    )  # fmt: skip
    return numbers[np.argsort(-total, kind="stable")].astype(np.int32)
