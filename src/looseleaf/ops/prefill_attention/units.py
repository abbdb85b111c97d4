"""The units in which the kernel of the Hopper generation reads a span list: its tiles, whole or in
parts.

Few tiles leave processors idle, so their keys are read in several parts at a time, each of which
leaves a state of its own, and the states of a row are merged (docs/ideas.md). A part holds whole
blocks of keys, counted over all spans that the rows of its tile may see, wherever spans begin and
end.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class UnitCosts:
    """What units cost, in microseconds: ``start`` each and ``per_block`` for a block of keys, while
    ``programs`` are in flight; and a merge, ``launch`` and ``per_state`` for a row and KV head."""

    programs: int
    start: float
    per_block: float
    launch: float
    per_state: float

    def time(self, parts: Sequence[int], tiles: Sequence[tuple[int, int]], num_heads: int) -> float:
        """How long ``tiles`` (blocks, rows) take in so many ``parts`` each, which are in flight at
        the same time."""
        longest = max(-(-blocks // count) for (blocks, _), count in zip(tiles, parts, strict=True))
        time = self.start + self.per_block * longest
        if max(parts) > 1:
            states = sum(count * rows for count, (_, rows) in zip(parts, tiles, strict=True))
            time += self.launch + self.per_state * states * num_heads
        return time


def best_parts(tiles: Sequence[tuple[int, int]], num_heads: int, costs: UnitCosts) -> list[int]:
    """In how many parts ``tiles`` (blocks, rows) are read soonest: whole where they fill the
    device, else cut to about one length, so that all parts are in flight at a time.

    Parts that wait for others cost more than they save (docs/log.md)."""
    whole, slots = [1] * len(tiles), max(1, costs.programs // num_heads)
    if not 0 < len(tiles) < slots:
        return whole
    blocks = [max(1, one) for one, _ in tiles]
    length = _shortest(blocks, slots)
    cut = [-(-one // length) for one in blocks]
    soonest = costs.time(cut, tiles, num_heads) < costs.time(whole, tiles, num_heads)
    return cut if soonest else whole


def _shortest(blocks: Sequence[int], most: int) -> int:
    """The least number of blocks that parts may have for there to be ``most`` parts at most."""
    low, high = max(1, sum(blocks) // most), max(blocks)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-one // middle) for one in blocks) <= most:
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
    """The same of few tiles, for each its spans and blocks, one by one: before a first launch each
    call of numpy costs as much as some dozens of numbers."""
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
            slots = bound if patches[span] else min(max(last - offsets[span] + 1, 0), lengths[span])
            of_tile.append((span, -(-slots // KEYS)))
        seen.append(of_tile)
    return seen


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """``num_units``, ``unit_numbers`` and ``row_state_indptr`` of the arrays of a span list, and
    how many states its units leave; 0 if every row has one only, which is its answer.

    Without ``costs`` tiles are read whole."""
    indptr, num_tiles = arrays["tile_row_indptr"], len(arrays["tile_request"])
    rows = indptr[1:] - indptr[:-1]
    parts = [1] * num_tiles
    if num_tiles <= _FEW_TILES:
        of_tiles = _seen_by_few(arrays)
        if costs is not None and num_tiles <= costs.programs:
            totals = [sum(blocks for _, blocks in of_tile) for of_tile in of_tiles]
            parts = best_parts(list(zip(totals, rows.tolist(), strict=True)), num_heads, costs)
        units = _listed(of_tiles, indptr.tolist(), parts)
        of_rows = chain.from_iterable(map(repeat, parts, rows.tolist()))
        states = np.array([0, *accumulate(of_rows)], dtype=np.int32)
    else:
        seen = blocks_seen(arrays)
        total = np.bincount(seen[0], seen[2], num_tiles).astype(np.int64)
        if costs is not None and num_tiles <= costs.programs:
            tiles = list(zip(total.tolist(), rows.tolist(), strict=True))
            parts = best_parts(tiles, num_heads, costs)
        units = _listed_at_once(seen, indptr, total, np.array(parts, dtype=np.int64))
        states = np.zeros(int(indptr[-1]) + 1, dtype=np.int32)
        np.array(parts, dtype=np.int64).repeat(rows).cumsum(out=states[1:])
    made = {
        "num_units": np.array([len(units)], dtype=np.int32),
        "unit_numbers": units.ravel(),
        "row_state_indptr": states,
    }
    return made, int(states[-1]) if max(parts, default=1) > 1 else 0


def _listed(
    of_tiles: Sequence[Sequence[tuple[int, int]]], bounds: Sequence[int], parts: Sequence[int]
) -> npt.NDArray[np.int32]:
    """The units of few tiles (spans and blocks of each), the longest first, one by one."""
    units, state = list[tuple[int, tuple[int, ...]]](), 0
    for of_tile, (first, end), cut in zip(of_tiles, pairwise(bounds), parts, strict=True):
        spans = [span for span, _ in of_tile] or [0]
        for nth, stretch in enumerate(_stretches([n for _, n in of_tile], cut)):
            begin, last, start, stop, length = stretch
            read = spans[begin], spans[last] + (length > 0), start * KEYS, stop * KEYS
            units.append((-length, (first, end - first, *read, state + nth, cut)))
        state += (end - first) * cut
    units.sort(key=itemgetter(0))
    return np.array([numbers for _, numbers in units], dtype=np.int32)


def _stretches(blocks: Sequence[int], parts: int) -> Iterator[tuple[int, int, int, int, int]]:
    """A tile that sees so many ``blocks`` of each span, in near-equal parts: the first and the last
    span of each, the block from which on the first is read and that before which the last is, and
    how many blocks it has."""
    ends = list(accumulate(blocks))
    total = ends[-1] if ends else 0
    for nth in range(parts):
        first, stop = total * nth // parts, total * (nth + 1) // parts
        if first == stop:
            yield 0, 0, 0, 0, 0
            continue
        begin, last = bisect_right(ends, first), bisect_right(ends, stop - 1)
        start, end = first - ends[begin] + blocks[begin], stop - ends[last] + blocks[last]
        yield begin, last, start, end, stop - first


def _listed_at_once(
    seen: tuple[IntArray, IntArray, IntArray],
    indptr: IntArray,
    total: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """The same of many tiles, of ``total`` blocks each."""
    _, span, blocks = seen
    rows = indptr[1:] - indptr[:-1]
    of = np.repeat(np.arange(len(parts)), parts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    # blocks of all tiles in one row: where a unit begins and ends, and in which spans that is
    base, ends = np.cumsum(total) - total, np.cumsum(blocks)
    first = base[of] + total[of] * nth // parts[of]
    stop = base[of] + total[of] * (nth + 1) // parts[of]
    first_place, last_place = (
        np.minimum(np.searchsorted(ends, block, "right"), len(ends) - 1)
        for block in (first, stop - 1)
    )
    starts = ends - blocks
    begin = span[first_place]
    state = np.cumsum(rows * parts) - rows * parts
    numbers = np.stack(
        (
            indptr[of], rows[of],
            begin, np.where(stop > first, span[last_place] + 1, begin),
            (first - starts[first_place]) * KEYS, (stop - starts[last_place]) * KEYS,
            state[of] + nth, parts[of],
        ),
        axis=1,
    )  # fmt: skip
    return numbers[np.argsort(first - stop, kind="stable")].astype(np.int32)
