"""The units in which the kernel of the Hopper generation reads a span list: its tiles, whole or in
parts.

Few tiles leave processors idle, so their keys are read in several parts at a time, each of which
leaves a state of its own, and the states of a row are merged (DESIGN §1). A part holds whole blocks
of keys, counted over all spans that the rows of its tile may see, wherever spans begin and end.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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


def blocks_seen(arrays: Mapping[str, IntArray]) -> list[list[int]]:
    """Of each tile of a span list and each span of its request, in order: in how many blocks the
    keys lie that rows of the tile may see."""
    request, indptr = arrays["tile_request"], arrays["request_span_indptr"]
    counts = (indptr[1:] - indptr[:-1])[request]
    ends = counts.cumsum()
    tile = np.arange(len(request)).repeat(counts)
    span = np.arange(len(tile)) + (indptr[request] - (ends - counts)).repeat(counts)
    last = arrays["tile_row_indptr"][1:][tile] - 1
    before = arrays["row_positions"][last] - arrays["span_offset"][span] + 1
    slots = np.minimum(np.maximum(before, 0), arrays["span_length"][span])
    if "row_patch_bounds" in arrays:
        is_patch = arrays["span_explicit"][span] != 0
        slots = np.where(is_patch, arrays["row_patch_bounds"][last], slots)
    blocks, bounds = (-(-slots // KEYS)).tolist(), [0, *ends.tolist()]
    return [blocks[start:stop] for start, stop in pairwise(bounds)]


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """``num_units``, ``unit_numbers`` and ``row_state_indptr`` of the arrays of a span list, and
    how many states its units leave; 0 if every row has one only, which is its answer.

    Without ``costs`` tiles are read whole."""
    seen, indptr = blocks_seen(arrays), arrays["tile_row_indptr"]
    bounds, spans = indptr.tolist(), arrays["request_span_indptr"][arrays["tile_request"]].tolist()
    rows, parts = [stop - start for start, stop in pairwise(bounds)], [1] * len(seen)
    if costs is not None and len(seen) <= costs.programs:
        tiles = [(sum(blocks), count) for blocks, count in zip(seen, rows, strict=True)]
        parts = best_parts(tiles, num_heads, costs)
    # a few dozens: one by one they take a fifth of what as many calls of numpy do
    units, state = list[tuple[int, tuple[int, ...]]](), 0
    for blocks, first, count, span, cut in zip(seen, bounds, rows, spans, parts, strict=False):
        for nth, (begin, end, start, stop, length) in enumerate(_stretches(blocks, cut)):
            read = span + begin, span + end, start * KEYS, stop * KEYS
            units.append((-length, (first, count, *read, state + nth, cut)))
        state += count * cut
    units.sort(key=itemgetter(0))
    states = np.array([0, *parts]).repeat([1, *rows]).cumsum(dtype=np.int32)
    made = {
        "num_units": np.array([len(units)], dtype=np.int32),
        "unit_numbers": np.array([numbers for _, numbers in units], dtype=np.int32).ravel(),
        "row_state_indptr": states,
    }
    return made, state if max(parts, default=1) > 1 else 0


def _stretches(blocks: Sequence[int], parts: int) -> Iterator[tuple[int, int, int, int, int]]:
    """A tile that sees so many ``blocks`` of each span, in near-equal parts: the first and the end
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
        yield begin, last + 1, start, end, stop - first
