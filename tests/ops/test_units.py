"""The units of a span list read every block of keys that a tile sees once, and leave states that
are told apart."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from looseleaf.attention.plan.chunks import PrefillChunk, host_spans, with_units
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.ops.prefill_attention import units_reference
from looseleaf.ops.prefill_attention.units import KEYS, UNIT_NUMBERS, UnitCosts, span_units
from looseleaf.ops.prefill_attention.units_reference import Part, TileReads, best_parts

PAGE_SIZE, NUM_HEADS = 16, 8
COSTS = UnitCosts(132, start=8.0, per_block=1.7, border=1.7, launch=4.0, per_state=0.00025)
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=6)
# documents, whether a document is replaced in part, and how many rows stand in each and behind all
RECIPES = st.tuples(LENGTHS, st.booleans(), st.integers(0, 20), st.integers(1, 120))
# some eighty tiles of four rows: few enough to be cut if there is one head
MANY_TILES = [([300, 700, 40], True, 20, 120), ([128, 9], False, 8, 120)]


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


@given(
    recipes=st.lists(RECIPES, min_size=1, max_size=3),
    cut=st.booleans(),
    tile_rows=st.sampled_from([4, 32]),
    num_heads=st.sampled_from([1, NUM_HEADS]),
)
@example(recipes=MANY_TILES, cut=True, tile_rows=4, num_heads=1)
@example(recipes=MANY_TILES, cut=True, tile_rows=4, num_heads=NUM_HEADS)
def test_units_read_what_their_tiles_see_once_and_leave_a_state_for_each(
    recipes: list[tuple[list[int], bool, int, int]], cut: bool, tile_rows: int, num_heads: int
) -> None:
    whole = host_spans([chunk_of(*recipe) for recipe in recipes], tile_rows)
    spans = with_units(whole, num_heads, COSTS if cut else None)
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


@given(
    recipes=st.lists(RECIPES, min_size=1, max_size=3),
    tile_rows=st.sampled_from([4, 16, 32]),
    num_heads=st.sampled_from([1, NUM_HEADS]),
    border=st.sampled_from([0.0, 0.6, 1.7, 5.0]),
    programs=st.sampled_from([0, 8, 132, 264]),
)
@example(recipes=MANY_TILES, tile_rows=4, num_heads=1, border=1.7, programs=132)
def test_units_are_those_of_the_reference(
    recipes: list[tuple[list[int], bool, int, int]],
    tile_rows: int,
    num_heads: int,
    border: float,
    programs: int,
) -> None:
    arrays = host_spans([chunk_of(*recipe) for recipe in recipes], tile_rows).arrays
    costs = replace(COSTS, border=border, programs=programs) if programs else None
    told, num_states = span_units(arrays, num_heads, costs)
    expected, expected_states = units_reference.span_units(arrays, num_heads, costs)
    assert num_states == expected_states
    assert told.keys() == expected.keys()
    for name, array in told.items():
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_a_tile_that_sees_nothing_has_a_unit_that_reads_nothing() -> None:
    behind = PrefillChunk([0, 1], (ReadSpan(range(1), 5, 3, 0),))
    arrays = host_spans([behind, chunk_of([300], False, 0, 9)], 32).arrays
    for costs in (None, COSTS):
        told, _ = span_units(arrays, NUM_HEADS, costs)
        expected, _ = units_reference.span_units(arrays, NUM_HEADS, costs)
        for name, array in told.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
        units = told["unit_numbers"].reshape(-1, UNIT_NUMBERS)
        assert units[units[:, 0] == 0].tolist() == [[0, 2, 0, 0, 0, 0, 0, 1]]


TILES = st.lists(st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=30)
BORDERS = st.sampled_from([0.0, 0.6, 1.7, 5.0])


def reads(blocks: list[list[int]], costs: UnitCosts) -> list[TileReads]:
    return [TileReads(one, costs.border_steps) for one in blocks]


@given(blocks=st.lists(st.integers(1, 40), max_size=8), border=BORDERS, length=st.integers(4, 900))
def test_parts_of_a_tile_are_all_of_it_and_none_could_be_longer(
    blocks: list[int], border: float, length: int
) -> None:
    (tile,) = reads([blocks], replace(COSTS, border=border))
    parts = tile.parts(length)
    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
    assert parts[-1][1] == sum(blocks)
    span_of = [span for span, count in enumerate(blocks) for _ in range(count)]
    for part, behind in zip(parts, [*parts[1:], None], strict=True):
        first, stop, begin, last = part
        assert not blocks or (begin, last) == (span_of[first], span_of[stop - 1])
        assert tile.length(part) <= length
        if behind is not None:
            assert tile.length((first, stop + 1, begin, behind[2])) > length


@given(blocks=TILES, border=BORDERS)
def test_parts_are_all_in_flight_and_about_as_short_as_they_can_be(
    blocks: list[list[int]], border: float
) -> None:
    costs = replace(COSTS, border=border)
    tiles, slots = reads(blocks, costs), costs.programs // NUM_HEADS
    parts = best_parts(tiles, [32] * len(tiles), NUM_HEADS, costs)
    if all(len(cut) == 1 for cut in parts):
        return
    assert sum(map(len, parts)) <= slots
    longest = max(tile.length(one) for tile, cut in zip(tiles, parts, strict=True) for one in cut)
    shorter = longest - costs.border_steps - 8
    assert shorter < 4 or sum(len(tile.parts(shorter)) for tile in tiles) > slots


def test_a_part_that_crosses_a_border_has_fewer_blocks_than_one_that_does_not() -> None:
    """Two tiles of 64 new rows behind five documents of 4,096, on 132 processors: eight parts
    each, of which five cross a border that takes as long as a block."""
    tiles = reads([[32] * 5 + [1]] * 2, COSTS)
    (parts, other) = best_parts(tiles, [32, 32], NUM_HEADS, COSTS)
    assert parts == other
    assert len(parts) == 8
    for first, stop, begin, last in parts:
        assert stop - first <= (20 if begin < last else 21)


@given(blocks=TILES)
def test_cuts_are_never_expected_to_take_longer_and_some_take_half(blocks: list[list[int]]) -> None:
    def expected(tiles: list[TileReads], parts: list[list[Part]]) -> float:
        every = [(tile, one) for tile, cut in zip(tiles, parts, strict=True) for one in cut]
        states = 32 * len(every) if len(every) > len(tiles) else 0
        return COSTS.time(max(tile.length(one) for tile, one in every), states, NUM_HEADS)

    def whole(tiles: list[TileReads]) -> list[list[Part]]:
        return [[tile.whole()] for tile in tiles]

    tiles = reads(blocks, COSTS)
    cut = best_parts(tiles, [32] * len(tiles), NUM_HEADS, COSTS)
    assert expected(tiles, cut) <= expected(tiles, whole(tiles))
    # five tiles behind six documents of 512 tokens, on 132 processors
    few = reads([[4] * 6 + [2]] * 5, COSTS)
    assert expected(few, best_parts(few, [32] * 5, NUM_HEADS, COSTS)) < 35
    assert expected(few, whole(few)) > 60
