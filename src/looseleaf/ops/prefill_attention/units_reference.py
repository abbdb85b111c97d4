"""The units of a span list in Python: the definition of `looseleaf.ops.prefill_attention.units`."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from looseleaf.ops.prefill_attention.units import KEYS, STEPS, IntArray, UnitCosts

Part = tuple[int, int, int, int]
"""A part of a tile's blocks: first block, end block, and the tile's spans of its first and last
block."""


class TileReads:
    """The visible ``blocks`` of each span of a tile, at least one each.

    Lengths are in steps; a border of spans counts ``border`` steps."""

    def __init__(self, blocks: Sequence[int], border: int) -> None:
        self.border = border
        self.ends = list(accumulate(blocks))
        starts = (0, *self.ends[:-1])
        # steps from the tile's first block through the first block of each span
        self._arrival = [STEPS * (start + 1) + border * n for n, start in enumerate(starts)]

    @property
    def num_blocks(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def steps(self) -> int:
        """Length of the whole tile."""
        return self.length(self.whole())

    def length(self, part: Part) -> int:
        """Length of a part."""
        first, stop, begin, last = part
        return STEPS * (stop - first) + self.border * (last - begin)

    def whole(self) -> Part:
        """The part with all blocks."""
        return 0, self.num_blocks, 0, max(0, len(self.ends) - 1)

    def parts(self, length: int) -> list[Part]:
        """The longest consecutive parts of at most ``length``, which is at least one block."""
        ends, arrival, border = self.ends, self._arrival, self.border
        start, begin, total, parts = 0, 0, self.num_blocks, list[Part]()
        while start < total:
            most = STEPS * start + border * begin + length
            last = bisect_right(arrival, most) - 1
            stop = min(ends[last], (most - border * last) // STEPS)
            parts.append((start, stop, begin, last))
            start, begin = stop, last + (stop == ends[last])
        return parts or [self.whole()]


def best_parts(
    tiles: Sequence[TileReads], rows: Sequence[int], num_heads: int, costs: UnitCosts
) -> list[list[Part]]:
    """The parts of each tile with the least time: whole tiles, or parts of one length for all
    tiles.

    Tiles that fill the device stay whole. Parts that wait for others cost more than they save; a
    part across a border of spans has fewer blocks (docs/log.md)."""
    whole, slots = [[tile.whole()] for tile in tiles], max(1, costs.programs // num_heads)
    if not 0 < len(tiles) < slots:
        return whole
    steps = [tile.steps for tile in tiles]
    length = _least_length(steps, slots)
    cut = [tile.parts(length) for tile in tiles]
    while sum(map(len, cut)) > slots:
        # a part may stay shorter than its length by less than a block and a border
        length += STEPS // 2
        cut = [tile.parts(length) for tile in tiles]
    if max(map(len, cut)) == 1:
        return whole
    states = sum(len(parts) * count for parts, count in zip(cut, rows, strict=True))
    is_faster = costs.time(length, states, num_heads) < costs.time(max(steps), 0, num_heads)
    return cut if is_faster else whole


def _least_length(steps: Sequence[int], most: int) -> int:
    """The least length with which there are at most ``most`` parts, if parts could end anywhere."""
    low, high = max(STEPS, sum(steps) // most), max(STEPS, *steps)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-length // middle) for length in steps) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _blocks_seen(arrays: Mapping[str, IntArray]) -> list[list[tuple[int, int]]]:
    """For each tile: the spans of its request with visible keys, and their numbers of blocks."""
    indptr, rows = arrays["request_span_indptr"].tolist(), arrays["tile_row_indptr"][1:] - 1
    offsets, lengths = arrays["span_offset"].tolist(), arrays["span_length"].tolist()
    lasts, patch_bounds = arrays["row_positions"][rows].tolist(), [0] * len(rows)
    patches = [0] * len(lengths)
    if "row_patch_bounds" in arrays:
        patch_bounds = arrays["row_patch_bounds"][rows].tolist()
        patches = arrays["span_explicit"].tolist()
    tile_blocks = []
    requests = arrays["tile_request"].tolist()
    for request, last, bound in zip(requests, lasts, patch_bounds, strict=True):
        span_blocks = []
        for span in range(indptr[request], indptr[request + 1]):
            slots = bound if patches[span] else min(last - offsets[span] + 1, lengths[span])
            if slots > 0:
                span_blocks.append((span, -(-slots // KEYS)))
        tile_blocks.append(span_blocks)
    return tile_blocks


def span_units(
    arrays: Mapping[str, IntArray], num_heads: int, costs: UnitCosts | None
) -> tuple[dict[str, npt.NDArray[np.int32]], int]:
    """See `looseleaf.ops.prefill_attention.units.span_units`."""
    indptr, tile_blocks = arrays["tile_row_indptr"], _blocks_seen(arrays)
    border = costs.border_steps if costs is not None else 0
    tiles = [
        TileReads([blocks for _, blocks in span_blocks], border) for span_blocks in tile_blocks
    ]
    counts, parts = (indptr[1:] - indptr[:-1]).tolist(), [[tile.whole()] for tile in tiles]
    if costs is not None and len(tiles) * num_heads < costs.programs:
        parts = best_parts(tiles, counts, num_heads, costs)
    units = _unit_numbers(tile_blocks, tiles, indptr.tolist(), parts)
    states_of_rows = chain.from_iterable(map(repeat, map(len, parts), counts))
    states = np.array([0, *accumulate(states_of_rows)], dtype=np.int32)
    arrays_out = {
        "num_units": np.array([len(units)], dtype=np.int32),
        "unit_numbers": units.ravel(),
        "row_state_indptr": states,
    }
    return arrays_out, int(states[-1]) if len(units) > len(tiles) else 0


def _unit_numbers(
    tile_blocks: Sequence[Sequence[tuple[int, int]]],
    tiles: Sequence[TileReads],
    bounds: Sequence[int],
    parts: Sequence[Sequence[Part]],
) -> npt.NDArray[np.int32]:
    """The numbers of all units, the longest first; ``tile_blocks`` holds spans and blocks of
    each tile."""
    units, state = list[tuple[int, tuple[int, ...]]](), 0
    for span_blocks, tile, (first, end), cut in zip(
        tile_blocks, tiles, pairwise(bounds), parts, strict=True
    ):
        rows, ends, count = end - first, tile.ends, len(cut)
        for nth, (start, stop, begin, last) in enumerate(cut):
            reads = 0, 0, 0, 0
            if start < stop:
                (span, blocks), (last_span, last_blocks) = span_blocks[begin], span_blocks[last]
                start_slot, end_slot = start - ends[begin] + blocks, stop - ends[last] + last_blocks
                reads = span, last_span + 1, start_slot * KEYS, end_slot * KEYS
            units.append((start - stop, (first, rows, *reads, state + nth, count)))
        state += rows * count
    units.sort(key=itemgetter(0))
    return np.array([numbers for _, numbers in units], dtype=np.int32)
