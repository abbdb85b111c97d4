"""The units of a span list as they are meant, one by one: what those of
`looseleaf.ops.prefill_attention.units` answer to."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from looseleaf.ops.prefill_attention.units import KEYS, STEPS, IntArray, UnitCosts

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
        self._reached = [STEPS * (at + 1) + border * n for n, at in enumerate(firsts)]

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
        return STEPS * (stop - first) + self.border * (last - begin)

    def whole(self) -> Part:
        """All of it."""
        return 0, self.num_blocks, 0, max(0, len(self.ends) - 1)

    def parts(self, length: int) -> list[Part]:
        """All of it in parts as long as ``length`` lets them, which is that of a block or more."""
        ends, reached, border = self.ends, self._reached, self.border
        at, begin, total, parts = 0, 0, self.num_blocks, list[Part]()
        while at < total:
            most = STEPS * at + border * begin + length
            last = bisect_right(reached, most) - 1
            stop = min(ends[last], (most - border * last) // STEPS)
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
        length += STEPS // 2
        cut = [tile.parts(length) for tile in tiles]
    if max(map(len, cut)) == 1:
        return whole
    states = sum(len(parts) * count for parts, count in zip(cut, rows, strict=True))
    sooner = costs.time(length, states, num_heads) < costs.time(max(steps), 0, num_heads)
    return cut if sooner else whole


def _shortest(steps: Sequence[int], most: int) -> int:
    """The least length that parts may have for there to be ``most`` parts at most, if they could
    end anywhere."""
    low, high = max(STEPS, sum(steps) // most), max(STEPS, *steps)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-one // middle) for one in steps) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _blocks_seen(arrays: Mapping[str, IntArray]) -> list[list[tuple[int, int]]]:
    """Of each tile of a span list the spans of its request of which its rows see some keys, and in
    how many blocks these lie."""
    indptr, rows = arrays["request_span_indptr"].tolist(), arrays["tile_row_indptr"][1:] - 1
    offsets, lengths = arrays["span_offset"].tolist(), arrays["span_length"].tolist()
    lasts, of_patch = arrays["row_positions"][rows].tolist(), [0] * len(rows)
    patches = [0] * len(lengths)
    if "row_patch_bounds" in arrays:
        of_patch = arrays["row_patch_bounds"][rows].tolist()
        patches = arrays["span_explicit"].tolist()
    seen = []
    for request, last, bound in zip(arrays["tile_request"].tolist(), lasts, of_patch, strict=True):
        of_tile = []
        for span in range(indptr[request], indptr[request + 1]):
            slots = bound if patches[span] else min(last - offsets[span] + 1, lengths[span])
            if slots > 0:
                of_tile.append((span, -(-slots // KEYS)))
        seen.append(of_tile)
    return seen


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """See `looseleaf.ops.prefill_attention.units.span_units`."""
    indptr, of_tiles = arrays["tile_row_indptr"], _blocks_seen(arrays)
    border = costs.border_steps if costs is not None else 0
    tiles = [TileReads([blocks for _, blocks in of_tile], border) for of_tile in of_tiles]
    counts, parts = (indptr[1:] - indptr[:-1]).tolist(), [[tile.whole()] for tile in tiles]
    if costs is not None and len(tiles) * num_heads < costs.programs:
        parts = best_parts(tiles, counts, num_heads, costs)
    units = _listed(of_tiles, tiles, indptr.tolist(), parts)
    of_rows = chain.from_iterable(map(repeat, map(len, parts), counts))
    states = np.array([0, *accumulate(of_rows)], dtype=np.int32)
    made = {
        "num_units": np.array([len(units)], dtype=np.int32),
        "unit_numbers": units.ravel(),
        "row_state_indptr": states,
    }
    return made, int(states[-1]) if len(units) > len(tiles) else 0


def _listed(
    of_tiles: Sequence[Sequence[tuple[int, int]]],
    tiles: Sequence[TileReads],
    bounds: Sequence[int],
    parts: Sequence[Sequence[Part]],
) -> npt.NDArray[np.int32]:
    """The units of tiles (spans and blocks of each), the longest first."""
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
