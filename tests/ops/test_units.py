"""The units of a span list read every block of keys that a tile sees once, and leave states that
are told apart."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.attention.chunks import host_spans, with_units
from looseleaf.attention.groups import ReadSpan
from looseleaf.attention.plan import PrefillChunk
from looseleaf.attention.span_buffer import HostSpans
from looseleaf.ops.prefill_attention.units import KEYS, UNIT_NUMBERS, UnitCosts, best_parts

TILE_ROWS, PAGE_SIZE, NUM_HEADS = 32, 16, 8
COSTS = UnitCosts(programs=132, start=8.0, per_block=1.7, launch=4.0, per_state=0.00025)
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=6)
# documents, whether a document is replaced in part, and how many rows stand in each and behind all
RECIPES = st.tuples(LENGTHS, st.booleans(), st.integers(0, 20), st.integers(1, 120))


def chunk_of(lengths: list[int], patched: bool, rows_inside: int, rows_behind: int) -> PrefillChunk:
    """Rows inside of documents and behind them, with a patch where the rows inside stand."""
    spans, positions, at, page = [], [], 0, 0
    for length in lengths:
        count = -(-length // PAGE_SIZE)
        spans.append(ReadSpan(range(page, page + count), at, length, count))
        positions += range(at, at + min(rows_inside, length))
        at, page = at + length, page + count
    if patched and positions:
        places = np.array(positions)
        patch = range(page, page + -(-len(places) // PAGE_SIZE))
        page = patch.stop
        spans.append(ReadSpan(patch, 0, len(places), 0, places=places))
    tail = range(page, page + -(-rows_behind // PAGE_SIZE))
    spans.append(ReadSpan(tail, at, rows_behind, 0))
    return PrefillChunk([*positions, *range(at, at + rows_behind)], tuple(spans))


def slots_read(spans: HostSpans, unit: np.ndarray) -> list[tuple[int, int]]:
    """(span, slot) of all that a unit reads, as its numbers say."""
    a = spans.arrays
    first, rows, begin, end, skip, before = unit[:6]
    last = first + rows - 1
    read = []
    for span in range(begin, end):
        seen = int(a["row_positions"][last] - a["span_offset"][span] + 1)
        seen = max(0, min(seen, int(a["span_length"][span])))
        if a["span_explicit"][span]:
            seen = int(a["row_patch_bounds"][last])
        if span == end - 1:
            seen = min(seen, before)
        read += [(span, slot) for slot in range(skip if span == begin else 0, seen)]
    return read


@given(recipes=st.lists(RECIPES, min_size=1, max_size=3), cut=st.booleans())
def test_units_read_what_their_tiles_see_once_and_leave_a_state_for_each(
    recipes: list[tuple[list[int], bool, int, int]], cut: bool
) -> None:
    whole = host_spans([chunk_of(*recipe) for recipe in recipes], TILE_ROWS)
    spans = with_units(whole, NUM_HEADS, COSTS if cut else None)
    a = spans.arrays
    units = a["unit_numbers"].reshape(-1, UNIT_NUMBERS)
    assert len(units) == a["num_units"][0] == spans.num_units
    tiles = list(zip(a["tile_row_indptr"][:-1], a["tile_row_indptr"][1:], strict=True))
    assert {(u[0], u[0] + u[1]) for u in units} == set(tiles)
    states = []
    for number, (first, stop) in enumerate(tiles):
        request = a["tile_request"][number]
        begin, end = a["request_span_indptr"][request : request + 2]
        seen = slots_read(spans, np.array([first, stop - first, begin, end, 0, 2**31 - 1]))
        mine = sorted((u for u in units if u[0] == first), key=lambda u: u[6])
        assert [slot for unit in mine for slot in slots_read(spans, unit)] == seen
        assert all(unit[4] % KEYS == 0 for unit in mine)
        for row in range(first, stop):
            states.append([int(unit[6] + (row - first) * unit[7]) for unit in mine])
    indptr = a["row_state_indptr"]
    for row, mine in enumerate(states):
        assert mine == list(range(indptr[row], indptr[row + 1]))
    # without cuts a row's state is its answer
    assert spans.num_states == (indptr[-1] if len(units) > len(tiles) else 0)
    assert cut or not spans.num_states


@given(tiles=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 32)), min_size=1, max_size=60))
def test_cuts_are_never_expected_to_take_longer_and_some_take_half(
    tiles: list[tuple[int, int]],
) -> None:
    whole = [1] * len(tiles)
    parts = best_parts(tiles, NUM_HEADS, COSTS)
    assert COSTS.time(parts, tiles, NUM_HEADS) <= COSTS.time(whole, tiles, NUM_HEADS)
    assert all(count <= max(1, blocks) for count, (blocks, _) in zip(parts, tiles, strict=True))
    # five tiles behind six documents of 512 tokens, on 132 processors
    few = [(26, 32)] * 5
    assert COSTS.time(best_parts(few, NUM_HEADS, COSTS), few, NUM_HEADS) < 33
    assert COSTS.time([1] * 5, few, NUM_HEADS) > 50
