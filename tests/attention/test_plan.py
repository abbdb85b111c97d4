"""The plan's arrays say what the rows and chunks say, in the operators' terms."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.attention.buffers.work_buffer import WorkBuffer, WorkCapacity
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list
from looseleaf.attention.plan.cost_model import CostModel, TileCost, default_cost_model
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.plan.lists import HostWork
from looseleaf.attention.plan.planner import AttentionPlan, Planner
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import Tile, WorkList, partial_attention
from looseleaf.types import ScoreRule
from looseleaf_lab.testing.scene import rotation_table
from tests.attention.forests import PAGE_SIZE, STEPS, StepRecipe, decode_rows, spans_of


def cost_model(per_key: float = 0.05) -> CostModel:
    """Few programs and small tiles, so that small steps are cut, grouped and read wide."""
    narrow, wide = Tile(4, 16, 4, 1, 1), Tile(16, 16, 4, 1, 1)
    return CostModel(
        TileCost(narrow, 6, 0.1, per_key, per_key / 3),
        TileCost(wide, 6, 0.1, per_key, per_key),
        launch=0.1,
        per_state=0.001,
        share_keys=24,
    )


def planner(costs: CostModel | None = None, *, batch_invariant: bool = False) -> Planner:
    return Planner(PAGE_SIZE, 4, 2, torch.device("cpu"), costs or cost_model(), batch_invariant)


def planned(
    rows: list[DecodeRow], chunks: Sequence[PrefillChunk] = (), *, grouping: bool = True
) -> AttentionPlan:
    made = planner()
    return made.plan(rows, made.group(rows, grouping=grouping), chunks)


def arrays(lists: object) -> dict[str, list[int]]:
    return {n: v.tolist() for n, v in vars(lists).items() if isinstance(v, torch.Tensor)}


def key_reads(work: WorkList) -> list[tuple[int, int, int, int, int]]:
    """(row, page, frame position of its first slot, offset, bound) of every page of every entry."""
    a = arrays(work)
    reads = []
    for item in range(a["num_items"][0]):
        pages = range(*a["item_page_indptr"][item : item + 2])
        for entry in range(*a["item_entry_indptr"][item : item + 2]):
            stated = a["entry_offset"][entry], a["entry_bound"][entry]
            reads += [
                (a["entry_row"][entry], a["page_indices"][n], a["page_positions"][n], *stated)
                for n in pages
            ]
    return sorted(reads)


@given(step=STEPS, grouping=st.booleans(), invariant=st.booleans())
def test_a_work_list_reads_what_the_rows_read_however_it_is_grouped_and_split(
    step: StepRecipe, grouping: bool, invariant: bool
) -> None:
    rows = decode_rows(step)
    made = planner(batch_invariant=invariant)
    plan = made.plan(rows, made.group(rows, grouping=grouping), ())
    assert plan.work is not None
    assert plan.spans is None
    assert plan.num_work_rows == len(rows)
    assert key_reads(plan.work) == sorted(
        (index, page, n * PAGE_SIZE, span.offset, span.length)
        for index, row in enumerate(rows)
        for span in spans_of(row)
        for n, page in enumerate(span.pages)
    )
    assert plan.work.row_positions.tolist() == [row.position for row in rows]


@given(step=STEPS, grouping=st.booleans())
def test_every_entry_writes_one_state_and_those_of_a_row_lie_side_by_side(
    step: StepRecipe, grouping: bool
) -> None:
    rows = decode_rows(step)
    work = planned(rows, grouping=grouping).work
    assert work is not None
    a = arrays(work)
    assert sorted(a["entry_state"]) == list(range(work.state_capacity))
    for row, (first, last) in enumerate(pairwise(a["row_state_indptr"])):
        mine = [s for s, r in zip(a["entry_state"], a["entry_row"], strict=True) if r == row]
        assert sorted(mine) == list(range(first, last))
    assert a["row_state_indptr"][-1] == work.state_capacity


def test_plan_arrays_are_int32_without_masks_patches_or_selection() -> None:
    row = DecodeRow(20, (), ReadSpan((3, 4), 0, 21, 0))
    chunk = PrefillChunk(range(5), (ReadSpan((5,), 0, 5, 0),))
    work = planned([row]).work
    assert work is not None
    spans = make_span_list([chunk], tile_rows=64, device=torch.device("cpu"))
    for lists in (work, spans):
        tensors = [value for value in vars(lists).values() if isinstance(value, torch.Tensor)]
        assert all(tensor.dtype == torch.int32 for tensor in tensors)
        assert not lists.mask_words.numel()
    assert set(work.item_kv_head.tolist()) == set(work.entry_mask.tolist()) == {-1}
    assert set(work.item_explicit.tolist()) == set(spans.span_explicit.tolist()) == {0}
    assert spans.span_mask.tolist() == [-1]


@pytest.mark.parametrize("tile_rows", [1, 3, 64])
def test_a_span_list_cuts_chunks_into_tiles_and_keeps_rows_and_spans(tile_rows: int) -> None:
    lead, document = ReadSpan((1,), 0, 7, 1), ReadSpan((2, 3), 7, 20, 2)
    tail = ReadSpan((4, 5), 27, 18, 0)
    chunks = [
        PrefillChunk(range(27, 45), (lead, document, tail)),
        PrefillChunk(range(7, 9), (ReadSpan((6,), 0, 9, 0),)),
    ]
    a = arrays(make_span_list(chunks, tile_rows=tile_rows, device=torch.device("cpu")))
    assert a["row_positions"] == [*range(27, 45), 7, 8]
    assert a["request_span_indptr"] == [0, 3, 4]
    assert a["span_page_indptr"] == [0, 1, 3, 5, 6]
    assert a["page_indices"] == [1, 2, 3, 4, 5, 6]
    assert a["span_offset"] == [0, 7, 27, 0]
    assert a["span_length"] == [7, 20, 18, 9]
    bounds = list(pairwise(a["tile_row_indptr"]))
    assert len(bounds) == a["num_tiles"][0] == -(-18 // tile_rows) + -(-2 // tile_rows)
    assert max(last - first for first, last in bounds) <= tile_rows
    # a tile never holds rows of two chunks
    assert [int(first >= 18) for first, _ in bounds] == a["tile_request"]
    assert all(last <= 18 or first >= 18 for first, last in bounds)


@given(step=STEPS, grouping=st.booleans())
def test_every_piece_is_launched_once_by_a_tile_that_has_room_for_its_rows(
    step: StepRecipe, grouping: bool
) -> None:
    rows = decode_rows(step)
    work = planned(rows, grouping=grouping).work
    assert work is not None
    assert work.tile_indptr is not None
    bounds = work.tile_indptr.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == work.num_items.item()
    entries = np.diff(work.item_entry_indptr.numpy())
    for tile, (first, last) in zip(work.tiles, pairwise(bounds), strict=True):
        assert all(2 * count <= tile.block_m for count in entries[first:last])


@given(step=STEPS)
def test_a_batch_invariant_row_reads_the_same_pieces_whoever_is_with_it(step: StepRecipe) -> None:
    """Same keys cut at the same places, merged in the same order, by the same tile."""
    rows = decode_rows(step)
    made = planner(batch_invariant=True)
    together = made.plan(rows, made.group(rows, grouping=True), ()).work
    assert together is not None
    assert len(together.tiles) == 1
    for index, row in enumerate(rows):
        alone = made.plan([row], made.group([row], grouping=False), ()).work
        assert alone is not None
        assert pieces_of(together, index) == pieces_of(alone, 0)


def pieces_of(work: WorkList, row: int) -> list[tuple[list[int], int]]:
    """The pages of each state of a row, in the order of the merge, and how far they are seen."""
    a = arrays(work)
    first, last = a["row_state_indptr"][row : row + 2]
    found = {}
    for item in range(a["num_items"][0]):
        pages = a["page_indices"][slice(*a["item_page_indptr"][item : item + 2])]
        for entry in range(*a["item_entry_indptr"][item : item + 2]):
            if a["entry_row"][entry] == row:
                found[a["entry_state"][entry]] = (pages, a["entry_bound"][entry])
    assert sorted(found) == list(range(first, last))
    return [found[state] for state in range(first, last)]


def test_a_few_new_rows_are_read_by_work_list_and_see_nothing_behind_them() -> None:
    document = ReadSpan(tuple(range(40)), 0, 40 * PAGE_SIZE, 40)
    tail = ReadSpan((50, 51), 40 * PAGE_SIZE, PAGE_SIZE + 3, 0)
    positions = range(tail.offset + 5, tail.offset + tail.length)
    plan = planned([], [PrefillChunk(positions, (document, tail))])
    assert plan.spans is None
    assert plan.work is not None
    assert plan.num_work_rows == len(positions)
    seen = {(row, bound) for row, page, _, _, bound in key_reads(plan.work) if page == 50}
    assert seen == {(n, 6 + n) for n in range(len(positions))}


def asked(rows: int, documents: int, length: int) -> list[PrefillChunk]:
    """New rows behind documents."""
    starts = [n * length for n in range(documents)]
    spans = [ReadSpan(range(length // PAGE_SIZE), at, length, 0) for at in starts]
    own = ReadSpan(range(-(-rows // PAGE_SIZE)), documents * length, rows, 0)
    behind = range(documents * length, documents * length + rows)
    return [PrefillChunk(behind, (*spans, own))]


def test_few_new_rows_are_read_by_work_list_with_those_that_decode() -> None:
    """Not where tiles of spans fill the device anyway, nor where bits may not change."""
    costs = default_cost_model(128, 2, 132, hopper=True)
    made, exact = planner(costs), planner(costs, batch_invariant=True)
    assert made.by_work_list(asked(256, 5, 4096))
    assert not exact.by_work_list(asked(256, 5, 4096))
    assert not made.by_work_list(asked(4096, 5, 4096))
    assert not made.by_work_list(40 * asked(64, 5, 4096))


def test_rows_that_share_too_little_read_it_each_on_its_own() -> None:
    long, short = tuple(range(64)), (100,)
    costs = default_cost_model(128, 2, 132)
    for pages, grouped in ((long, True), (short, False)):
        shared = ReadSpan(pages, 0, len(pages) * PAGE_SIZE, len(pages))
        rows = [
            DecodeRow(n, (shared,), ReadSpan((200 + n,), shared.length, 1, 0)) for n in range(2)
        ]
        made = planner(costs)
        groups = made.group(rows, grouping=True)
        assert [len(item.entries) for item in groups.items] == ([2] if grouped else [1, 1])
        assert made.counters.refused_groups == (not grouped)


@given(steps=st.lists(STEPS, min_size=2, max_size=3))
def test_a_buffer_holds_one_list_after_the_other_at_the_same_addresses(
    steps: list[StepRecipe],
) -> None:
    lists: list[tuple[HostWork, int]] = []
    for step in steps:
        rows, made = decode_rows(step), planner(cost_model(per_key=1e-6))
        work = made.host_work(rows, made.group(rows, grouping=False))
        assert work is not None
        lists.append((work, len(rows)))
    tiles = lists[0][0].tiles
    buffer = WorkBuffer(WorkCapacity(20, 500, 500, 2000), tiles, torch.device("cpu"))
    addresses = {n: v.data_ptr() for n, v in vars(buffer.work).items() if n == "page_indices"}
    for work, num_rows in lists:
        buffer.load(work)
        buffer.fetch()
        buffer.sent()
        assert key_reads(buffer.work) == key_reads(work.to(torch.device("cpu")))
        indptr = buffer.work.row_state_indptr.tolist()
        assert set(indptr[num_rows:]) == {work.num_entries}
    assert addresses["page_indices"] == buffer.work.page_indices.data_ptr()


def test_rows_of_one_state_each_have_it_as_their_answer() -> None:
    made = planner()
    alone = [DecodeRow(n + 4, (), ReadSpan((n,), 0, n + 5, 0)) for n in range(3)]
    shared = ReadSpan((7,), 0, PAGE_SIZE, 1)
    behind = [DecodeRow(16, (shared,), ReadSpan((n,), PAGE_SIZE, 1, 0)) for n in range(3)]

    def work_of(rows: Sequence[DecodeRow], *, finish: bool = True) -> HostWork:
        work = made.host_work(rows, made.group(rows, grouping=True), finish=finish)
        assert work is not None
        return work

    whole = work_of(alone)
    assert [tile.whole for tile in whole.tiles] == [True]
    assert whole.arrays["entry_state"].tolist() == whole.arrays["entry_row"].tolist()
    # others may join what is not finished, and two states must be merged
    for work in (work_of(alone, finish=False), work_of(behind), work_of([*alone, behind[0]])):
        assert not any(tile.whole for tile in work.tiles)


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
def test_a_whole_list_leaves_what_its_merge_would(implementation: Implementation) -> None:
    made = planner()
    rows = [DecodeRow(n + 20, (), ReadSpan((3 - n,), 0, n + 5, 0)) for n in range(3)]
    work = made.plan(rows, made.group(rows, grouping=True), (), finish=True).work
    assert work is not None and work.whole
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 4, 2, PAGE_SIZE, 32, generator=generator, dtype=torch.float16)
    q = torch.randn(3, 4, 32, generator=generator, dtype=torch.float16)
    table = rotation_table(0.9 ** torch.arange(16).double(), 40, False)
    how = table, ScoreRule(32**-0.5), None, implementation
    found = partial_attention(q, *kv, work, *how)
    narrow = replace(work, tiles=tuple(replace(tile, whole=False) for tile in work.tiles))
    states = partial_attention(q, *kv, narrow, *how)
    merged = merge_states(states, work.row_state_indptr, out=torch.empty_like(q))
    assert found.out.dtype == torch.float16
    assert torch.equal(found.out, merged.out)
    assert torch.equal(found.lse, merged.lse)


@pytest.mark.parametrize(
    "lengths", [[8192] * 34, [16384] * 24, [400 * n + 77 for n in range(1, 40)]]
)
def test_programs_read_equal_shares_of_keys_that_nobody_shares(lengths: list[int]) -> None:
    costs = default_cost_model(128, 2, 132, hopper=True)
    made = Planner(16, 32, 8, torch.device("cpu"), costs)
    rows, page = [], 0
    for length in lengths:
        pages = range(page, page - (-length // 16))
        rows.append(DecodeRow(length - 1, (), ReadSpan(pages, 0, length, 0)))
        page = pages.stop
    work = made.plan(rows, made.group(rows, grouping=True), ()).work
    assert work is not None
    # a program of a KV head takes every 33rd item
    read = 16 * np.diff(work.item_page_indptr.numpy())
    shares = [int(read[n::33].sum()) for n in range(33)]
    assert max(shares) - min(shares) <= 4 * costs.narrow.tile.block_n
    assert max(shares) < 1.03 * sum(lengths) / 33
    # short ones are not worth it: nothing is merged if every row is read whole
    few = made.host_work(rows[:1], made.group(rows[:1], grouping=True), finish=True)
    assert few is not None and few.num_items != 33
