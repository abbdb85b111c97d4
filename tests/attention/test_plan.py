"""The plan's arrays say what the rows and chunks say, in the operators' terms."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.attention.groups import DecodeRow, ReadSpan, group_rows
from looseleaf.attention.plan import AttentionPlan, PrefillChunk, make_plan
from looseleaf.ops.partial_attention import WorkList
from tests.attention.forests import PAGE_SIZE, STEPS, StepRecipe, decode_rows, spans_of


def planned(
    rows: list[DecodeRow],
    chunks: Sequence[PrefillChunk] = (),
    *,
    grouping: bool = True,
    split_pages: int = 1 << 20,
    tile_rows: int = 64,
) -> AttentionPlan:
    return make_plan(
        rows,
        group_rows(rows, grouping=grouping),
        chunks,
        page_size=PAGE_SIZE,
        split_keys=split_pages * PAGE_SIZE,
        tile_rows=tile_rows,
        device=torch.device("cpu"),
    )


def arrays(lists: object) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in vars(lists).items()}


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


@given(step=STEPS, grouping=st.booleans(), split_pages=st.sampled_from([1, 2, 1 << 20]))
def test_a_work_list_reads_what_the_rows_read_however_it_is_grouped_and_split(
    step: StepRecipe, grouping: bool, split_pages: int
) -> None:
    rows = decode_rows(step)
    plan = planned(rows, grouping=grouping, split_pages=split_pages)
    assert plan.work is not None
    assert plan.spans is None
    assert plan.num_decode_rows == len(rows)
    assert key_reads(plan.work) == sorted(
        (index, page, n * PAGE_SIZE, span.offset, span.length)
        for index, row in enumerate(rows)
        for span in spans_of(row)
        for n, page in enumerate(span.pages)
    )
    assert max(np.diff(plan.work.item_page_indptr)) <= split_pages
    assert plan.work.row_positions.tolist() == [row.position for row in rows]


@given(step=STEPS, grouping=st.booleans(), split_pages=st.sampled_from([1, 1 << 20]))
def test_every_entry_writes_one_state_and_those_of_a_row_lie_side_by_side(
    step: StepRecipe, grouping: bool, split_pages: int
) -> None:
    rows = decode_rows(step)
    work = planned(rows, grouping=grouping, split_pages=split_pages).work
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
    plan = planned([row], [chunk])
    assert plan.work is not None
    assert plan.spans is not None
    for lists in (plan.work, plan.spans):
        assert all(tensor.dtype == torch.int32 for tensor in vars(lists).values())
    assert plan.work.item_kv_head.tolist() == [-1]
    assert plan.work.item_explicit.tolist() == plan.spans.span_explicit.tolist() == [0]
    assert plan.work.entry_mask.tolist() == plan.spans.span_mask.tolist() == [-1]


@pytest.mark.parametrize("tile_rows", [1, 3, 64])
def test_a_span_list_cuts_chunks_into_tiles_and_keeps_rows_and_spans(tile_rows: int) -> None:
    lead, document = ReadSpan((1,), 0, 7, 1), ReadSpan((2, 3), 7, 20, 2)
    tail = ReadSpan((4, 5), 27, 18, 0)
    chunks = [
        PrefillChunk(range(27, 45), (lead, document, tail)),
        PrefillChunk(range(7, 9), (ReadSpan((6,), 0, 9, 0),)),
    ]
    spans = planned([], chunks, tile_rows=tile_rows).spans
    assert spans is not None
    a = arrays(spans)
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
