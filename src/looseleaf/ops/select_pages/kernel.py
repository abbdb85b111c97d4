"""Selection of pages on the device: one program a row and KV head, which holds all its scores.

A score's bits, with those of negative numbers turned over, order as integers do. The score that
just enough pages reach is found by narrowing an interval, three cuts at a time, until no more and
no fewer pages than wanted stand above it: there is seldom need to look at the last bits. Then the
pages that reach it are written side by side, in order."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages, SeenPages

# the key of -inf, and a key below all others
_NOTHING = tl.constexpr(-2139095041)
_ABSENT = tl.constexpr(-2147483648)
# scores that one program holds at a time
_MOST_HELD = 32768


@triton.jit
def _keys(scores, ordinal, exists):
    """The scores as integers that order alike; least of all what does not exist."""
    score = tl.load(scores + ordinal, mask=exists, other=0.0)
    # there are two zeros, and they are equal
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), _ABSENT)


@triton.jit
def _reaching(keys, low, middle, high):
    """How many keys reach each of three, in one sum: 21 bits each."""
    reach = (keys >= low).to(tl.int64) + ((keys >= middle).to(tl.int64) << 21)
    return tl.sum(reach + ((keys >= high).to(tl.int64) << 42), 0)


@triton.jit
def _threshold(scores, keys, count, limit, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """The largest key that ``limit`` or more keys reach, or any that just ``limit`` reach; and how
    many that is."""
    low, high = count.to(tl.int64) * 0 + _NOTHING, count.to(tl.int64) * 0 + 2147483647
    reached = count
    while (high - low > 1) & (reached > limit):
        step = tl.maximum((high - low) // 4, 1)
        one, two = low + step, tl.minimum(low + 2 * step, high)
        three = tl.minimum(low + 3 * step, high)
        if HELD:
            counts = _reaching(keys, one.to(tl.int32), two.to(tl.int32), three.to(tl.int32))
        else:
            counts = low * 0
            for start in range(0, count, BLOCK):
                ordinal = start + tl.arange(0, BLOCK)
                some = _keys(scores, ordinal, ordinal < count)
                counts += _reaching(some, one.to(tl.int32), two.to(tl.int32), three.to(tl.int32))
        first, second, third = counts & 2097151, (counts >> 21) & 2097151, counts >> 42
        if first < limit:
            high = one
        elif second < limit:
            low, high, reached = one, two, first.to(tl.int32)
        elif third < limit:
            low, high, reached = two, three, second.to(tl.int32)
        else:
            low, reached = three, third.to(tl.int32)
    return low.to(tl.int32), reached


@triton.jit
def store_items(
    place, first_page, chosen, in_span, spans_of_row, first_item, first_entry,
    span_offset, span_bound, span_mask, item_page_indptr, entry_offset, entry_bound, entry_mask,
    most_spans, num_parts, least_pages,
    MANY_SPANS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """The items of ``chosen`` pages from ``first_page`` on: cut in parts, and where a span begins;
    ``in_span`` of them lie in each span."""
    num_items = num_parts + most_spans - 1
    item, entry = first_item + place * (num_items + 1), first_entry + place * num_items
    pages_per_part = tl.maximum((chosen + num_parts - 1) // num_parts, least_pages)
    o_part = tl.arange(0, BLOCK_PARTS)
    m_part = o_part < num_parts
    part_cut = tl.minimum(o_part * pages_per_part, chosen)
    part_rank, part_span = o_part, tl.zeros_like(o_part)
    if MANY_SPANS:
        # where spans and parts begin, each by its rank among all
        o_span = tl.arange(0, BLOCK_SPANS)
        m_span = (o_span > 0) & (o_span < most_spans)
        span_cut = tl.cumsum(in_span, 0) - in_span
        earlier = m_span[None, :] & (span_cut[None, :] < part_cut[:, None])  # [parts, spans]
        part_rank = o_part + tl.sum(earlier.to(tl.int32), 1)
        sooner = m_part[:, None] & (part_cut[:, None] <= span_cut[None, :])
        span_rank = o_span - 1 + tl.sum(sooner.to(tl.int32), 0)
        begun = m_span[None, :] & (span_cut[None, :] <= part_cut[:, None])
        part_span = tl.sum(begun.to(tl.int32), 1)
        also = m_span[None, :] & (span_cut[None, :] <= span_cut[:, None])
        span_span = tl.sum(also.to(tl.int32), 1)
        tl.store(item_page_indptr + item + span_rank, first_page + span_cut, mask=m_span)
        _store_spans(
            spans_of_row + span_span, entry + span_rank, m_span, span_offset, span_bound,
            span_mask, entry_offset, entry_bound, entry_mask,
        )  # fmt: skip
    tl.store(item_page_indptr + item + part_rank, first_page + part_cut, mask=m_part)
    tl.store(item_page_indptr + item + num_items, first_page + chosen)
    _store_spans(
        spans_of_row + part_span, entry + part_rank, m_part, span_offset, span_bound, span_mask,
        entry_offset, entry_bound, entry_mask,
    )  # fmt: skip


@triton.jit
def _store_spans(
    span, entry, mask, span_offset, span_bound, span_mask, entry_offset, entry_bound, entry_mask
):
    """What entries know of their spans."""
    tl.store(entry_offset + entry, tl.load(span_offset + span, mask=mask), mask=mask)
    tl.store(entry_bound + entry, tl.load(span_bound + span, mask=mask), mask=mask)
    tl.store(entry_mask + entry, tl.load(span_mask + span, mask=mask), mask=mask)


@triton.jit
def _select_pages_kernel(
    scores, num_rows, num_pages, limits, pages, starts, spans, span_offset, span_bound, span_mask,
    item_page_indptr, page_indices, page_positions, entry_offset, entry_bound, entry_mask,
    registers, booked, row_slot, newly_sealed, candidate_row, row_positions, chosen_seen,
    chosen_spans, stride_slot, stride_register_head,
    most, most_spans, room, num_parts, least_pages,
    NUM_KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    MANY_SPANS: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    place = row * NUM_KV_HEADS + head
    if row < tl.load(num_rows):
        count = tl.load(num_pages + row)
        limit = tl.minimum(tl.load(limits + row), count)
        own_scores, o_row = scores + place.to(tl.int64) * most, row.to(tl.int64) * most
        o_block = tl.arange(0, BLOCK)
        again, first_new = count < 0, count
        if registers is not None:
            slot = tl.load(row_slot + row).to(tl.int64)
            position = tl.load(row_positions + tl.load(candidate_row + row))
            first_new = count - tl.load(newly_sealed + row)
            own_registers = registers + slot * stride_slot + head * stride_register_head
            p_booked = booked + slot * NUM_KV_HEADS + head
        await_previous(CHAINED)
        keys = _keys(own_scores, o_block, o_block < count)
        threshold, reached = _threshold(own_scores, keys, count, limit, BLOCK, HELD)
        if registers is not None:
            # a step that was computed in vain is marked already
            again = tl.load(p_booked) == position
            tl.store(p_booked, position.to(tl.int64))
        above, equals_seen = limit * 0, limit * 0
        if reached > limit:
            for start in range(0, count, BLOCK):
                keys = _keys(own_scores, start + o_block, start + o_block < count)
                above += tl.sum((keys > threshold).to(tl.int32), 0)

        first_page, chosen = place * room, limit * 0
        in_span = tl.zeros((BLOCK_SPANS,), tl.int32)
        for start in range(0, count, BLOCK):
            ordinal = start + o_block
            exists = ordinal < count
            keys = _keys(own_scores, ordinal, exists)
            taken = keys >= threshold
            if reached > limit:
                equal = (keys == threshold).to(tl.int32)
                nth_equal = equals_seen + tl.cumsum(equal, 0) - equal
                taken = (keys > threshold) | ((equal > 0) & (nth_equal < limit - above))
                equals_seen += tl.sum(equal, 0)
            taken = taken & (keys > _NOTHING)
            if registers is not None:
                taken = taken | (exists & (ordinal >= first_new))
            ones = taken.to(tl.int32)
            to = first_page + chosen + tl.cumsum(ones, 0) - ones
            page = tl.load(pages + o_row + ordinal, mask=taken, other=0)
            position_of = tl.load(starts + o_row + ordinal, mask=taken, other=0)
            tl.store(page_indices + to, page, mask=taken)
            tl.store(page_positions + to, position_of, mask=taken)
            if MANY_SPANS:
                span = tl.load(spans + o_row + ordinal, mask=taken, other=0)
                in_span += tl.histogram(span, BLOCK_SPANS, mask=taken)
            if registers is not None:
                was = tl.load(own_registers + ordinal, mask=exists, other=0).to(tl.int32)
                marked = tl.where(again, was, (was << 1) | ones)
                tl.store(own_registers + ordinal, marked.to(tl.uint8), mask=exists)
                tl.store(chosen_seen + to, tl.where(again, 255, was), mask=taken)
                if MANY_SPANS:
                    tl.store(chosen_spans + to, span, mask=taken)
            chosen += tl.sum(ones, 0)
        store_items(
            place, first_page, chosen, in_span, row * most_spans, 0, 0,
            span_offset, span_bound, span_mask,
            item_page_indptr, entry_offset, entry_bound, entry_mask,
            most_spans, num_parts, least_pages, MANY_SPANS, BLOCK_PARTS, BLOCK_SPANS,
        )  # fmt: skip
    else:
        await_previous(CHAINED)


def select_pages_triton(
    scores: Float[Tensor, "rows kv_heads most"],
    candidates: CandidateList,
    into: ChosenPages,
    seen: SeenPages | None,
) -> None:
    """See `looseleaf.ops.select_pages`."""
    rows, num_kv_heads, most = scores.shape
    most_spans = candidates.span_offset.shape[1]
    work = into.work
    assert scores.is_contiguous() and candidates.pages.is_contiguous(), "lists are contiguous"
    block = max(32, min(_MOST_HELD, triton.next_power_of_2(most)))
    chained = chains(scores)
    kept = (None,) * 8 if seen is None else (
        seen.registers, seen.booked, seen.slot, seen.newly_sealed, candidates.row,
        work.row_positions, seen.chosen, seen.chosen_spans,
    )  # fmt: skip
    strides = (0, 0) if seen is None else seen.registers.stride()[:2]
    _select_pages_kernel[(rows, num_kv_heads)](
        scores, candidates.num_rows, candidates.num_pages, candidates.limit, candidates.pages,
        candidates.starts, candidates.spans, candidates.span_offset, candidates.span_bound,
        candidates.span_mask, work.item_page_indptr, work.page_indices, work.page_positions,
        work.entry_offset, work.entry_bound, work.entry_mask, *kept, *strides,
        most, most_spans, into.room, into.num_parts, into.least_pages,
        NUM_KV_HEADS=num_kv_heads, BLOCK=block, HELD=most <= block, MANY_SPANS=most_spans > 1,
        CHAINED=chained, BLOCK_PARTS=max(2, triton.next_power_of_2(into.num_parts)),
        # an index of spans is counted like a digit
        BLOCK_SPANS=max(32, triton.next_power_of_2(most_spans)),
        num_warps=max(4, min(32, block // 256)), enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
