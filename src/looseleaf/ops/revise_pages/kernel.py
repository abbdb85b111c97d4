"""Pages that are new to earlier rows, on the device: one program an earlier row and KV head, which
holds all that its newest row has chosen."""

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages, SeenPages
from looseleaf.ops.select_pages.kernel import store_items


@triton.jit
def _revise_pages_kernel(
    rows, num_rows, span_offset, span_bound, span_mask, chosen_seen, chosen_spans,
    item_page_indptr, page_indices, page_positions, entry_offset, entry_bound, entry_mask,
    each, most_spans, newest_items, room, num_parts, least_pages,
    first_page, first_item, first_entry,
    NUM_KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, MANY_SPANS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
    row, age = index // each, index % each + 1
    there = (tl.load(rows + index) >= 0) & (row < tl.load(num_rows))
    if there:
        item = (row * NUM_KV_HEADS + head) * (newest_items + 1)
        start = tl.load(item_page_indptr + item)
        count = tl.load(item_page_indptr + item + newest_items) - start
        o_chosen = tl.arange(0, BLOCK)
        exists = o_chosen < count
        was = tl.load(chosen_seen + start + o_chosen, mask=exists, other=255)
        new = exists & ((was & ((1 << age) - 1)) == 0)
        ones = new.to(tl.int32)
        place = index * NUM_KV_HEADS + head
        to = first_page + place * room
        o_to = to + tl.cumsum(ones, 0) - ones
        page = tl.load(page_indices + start + o_chosen, mask=new, other=0)
        position = tl.load(page_positions + start + o_chosen, mask=new, other=0)
        tl.store(page_indices + o_to, page, mask=new)
        tl.store(page_positions + o_to, position, mask=new)
        in_span = tl.zeros((BLOCK_SPANS,), tl.int32)
        if MANY_SPANS:
            span = tl.load(chosen_spans + start + o_chosen, mask=new, other=0)
            in_span = tl.histogram(span, BLOCK_SPANS, mask=new)
        store_items(
            place, to, tl.sum(ones, 0), in_span, row * most_spans, first_item, first_entry,
            span_offset, span_bound, span_mask,
            item_page_indptr, entry_offset, entry_bound, entry_mask,
            most_spans, num_parts, least_pages, MANY_SPANS, BLOCK_PARTS, BLOCK_SPANS,
        )  # fmt: skip


def revise_pages_triton(
    candidates: CandidateList,
    newest: ChosenPages,
    past: ChosenPages,
    seen: SeenPages,
    rows: Int[Tensor, " places"],
) -> None:
    """See `looseleaf.ops.revise_pages`."""
    work, heads, most_spans = newest.work, seen.booked.shape[1], candidates.span_offset.shape[1]
    if not len(rows):
        return
    block = max(32, triton.next_power_of_2(newest.room))
    _revise_pages_kernel[(len(rows), heads)](
        rows, candidates.num_rows, candidates.span_offset, candidates.span_bound,
        candidates.span_mask, seen.chosen, seen.chosen_spans, work.item_page_indptr,
        work.page_indices, work.page_positions, work.entry_offset, work.entry_bound,
        work.entry_mask, len(rows) // len(candidates.row), most_spans, newest.num_items,
        past.room, past.num_parts, past.least_pages,
        past.first_page, past.first_item, past.first_entry,
        NUM_KV_HEADS=heads, BLOCK=block, MANY_SPANS=most_spans > 1,
        BLOCK_PARTS=max(2, triton.next_power_of_2(past.num_parts)),
        BLOCK_SPANS=max(32, triton.next_power_of_2(most_spans)),
        num_warps=4 if block <= 1024 else 8, enable_fp_fusion=True,
    )  # fmt: skip
