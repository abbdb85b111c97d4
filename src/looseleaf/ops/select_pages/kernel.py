"""Selection of pages on the device: one program a row and KV head, scores read a few times.

A score's bits, with those of negative numbers turned over, order as integers do. Four passes count
digits of eight bits from the top; each tells the digit of the score that just enough pages reach.
One more pass writes the pages above it, and of those that equal it the first that are missing."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages


@triton.jit
def _keys(scores, ordinal, mask):
    """The scores as integers that order alike."""
    score = tl.load(scores + ordinal, mask=mask, other=0.0)
    # there are two zeros, and they are equal
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(scores, count, limit, BLOCK: tl.constexpr):
    """The key of the score number ``limit`` from the top, and how many that equal it are wanted."""
    SIGN: tl.constexpr = -2147483648
    o_digit = tl.arange(0, 256)
    found = limit * 0
    for step in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, BLOCK):
            ordinal = start + tl.arange(0, BLOCK)
            matches = ordinal < count
            # with the sign turned over, digits rise from 0
            key = _keys(scores, ordinal, matches) ^ SIGN
            if step > 0:
                matches = matches & ((key >> (32 - 8 * step)) == (found >> (32 - 8 * step)))
            counts += tl.histogram((key >> (24 - 8 * step)) & 255, 256, mask=matches)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (above < limit) & (above + counts >= limit)
        limit -= tl.sum(tl.where(here, above, 0), 0)
        found |= tl.sum(tl.where(here, o_digit, 0), 0) << (24 - 8 * step)
    return found ^ SIGN, limit


@triton.jit
def _select_pages_kernel(
    scores, num_rows, num_pages, limits, pages, starts, spans, span_offset, span_bound, span_mask,
    item_page_indptr, page_indices, page_positions, entry_offset, entry_bound, entry_mask,
    most, most_spans, room, pages_per_part, num_parts,
    NUM_KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    NOTHING: tl.constexpr = -2139095041  # the key of -inf
    row, place = tl.program_id(0), tl.program_id(0) * NUM_KV_HEADS + tl.program_id(1)
    if row < tl.load(num_rows):
        count = tl.load(num_pages + row)
        limit = tl.minimum(tl.load(limits + row), count)
        own_scores, o_row = scores + place.to(tl.int64) * most, row.to(tl.int64) * most
        threshold, equals = _threshold(own_scores, count, limit, BLOCK)
        equals = tl.where(threshold == NOTHING, 0, equals)

        first_page = place * room
        chosen, equals_seen = limit * 0, limit * 0
        in_span = tl.zeros((BLOCK_SPANS,), tl.int32)
        for start in range(0, count, BLOCK):
            ordinal = start + tl.arange(0, BLOCK)
            exists = ordinal < count
            key = _keys(own_scores, ordinal, exists)
            equal = (exists & (key == threshold)).to(tl.int32)
            nth_equal = equals_seen + tl.cumsum(equal, 0) - equal
            taken = (exists & (key > threshold)) | ((equal > 0) & (nth_equal < equals))
            ones = taken.to(tl.int32)
            to = first_page + chosen + tl.cumsum(ones, 0) - ones
            page = tl.load(pages + o_row + ordinal, mask=taken, other=0)
            position = tl.load(starts + o_row + ordinal, mask=taken, other=0)
            span = tl.load(spans + o_row + ordinal, mask=taken, other=0)
            tl.store(page_indices + to, page, mask=taken)
            tl.store(page_positions + to, position, mask=taken)
            in_span += tl.histogram(span, BLOCK_SPANS, mask=taken)
            chosen += tl.sum(ones, 0)
            equals_seen += tl.sum(equal, 0)

        # where spans and parts begin, each by its rank among all
        o_span, o_part = tl.arange(0, BLOCK_SPANS), tl.arange(0, BLOCK_PARTS)
        m_span, m_part = (o_span > 0) & (o_span < most_spans), o_part < num_parts
        span_cut = tl.cumsum(in_span, 0) - in_span
        part_cut = tl.minimum(o_part * pages_per_part, chosen)
        earlier = m_span[None, :] & (span_cut[None, :] < part_cut[:, None])  # [parts, spans]
        part_rank = o_part + tl.sum(earlier.to(tl.int32), 1)
        sooner = m_part[:, None] & (part_cut[:, None] <= span_cut[None, :])
        span_rank = o_span - 1 + tl.sum(sooner.to(tl.int32), 0)
        begun = m_span[None, :] & (span_cut[None, :] <= part_cut[:, None])
        part_span = tl.sum(begun.to(tl.int32), 1)
        also = m_span[None, :] & (span_cut[None, :] <= span_cut[:, None])
        span_span = tl.sum(also.to(tl.int32), 1)
        num_items = num_parts + most_spans - 1
        item, entry = place * (num_items + 1), place * num_items
        tl.store(item_page_indptr + item + part_rank, first_page + part_cut, mask=m_part)
        tl.store(item_page_indptr + item + span_rank, first_page + span_cut, mask=m_span)
        tl.store(item_page_indptr + item + num_items, first_page + chosen)
        o_spans = row * most_spans
        _store_spans(
            o_spans + part_span, entry + part_rank, m_part, span_offset, span_bound, span_mask,
            entry_offset, entry_bound, entry_mask,
        )  # fmt: skip
        _store_spans(
            o_spans + span_span, entry + span_rank, m_span, span_offset, span_bound, span_mask,
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


def select_pages_triton(
    scores: Float[Tensor, "rows kv_heads most"], candidates: CandidateList, into: ChosenPages
) -> None:
    """See `looseleaf.ops.select_pages`."""
    rows, num_kv_heads, most = scores.shape
    most_spans = candidates.span_offset.shape[1]
    work = into.work
    assert scores.is_contiguous() and candidates.pages.is_contiguous(), "lists are contiguous"
    block = max(32, min(4096, triton.next_power_of_2(most)))
    _select_pages_kernel[(rows, num_kv_heads)](
        scores, candidates.num_rows, candidates.num_pages, candidates.limit, candidates.pages,
        candidates.starts, candidates.spans, candidates.span_offset, candidates.span_bound,
        candidates.span_mask, work.item_page_indptr, work.page_indices, work.page_positions,
        work.entry_offset, work.entry_bound, work.entry_mask,
        most, most_spans, into.room, into.pages_per_part, into.num_parts,
        NUM_KV_HEADS=num_kv_heads, BLOCK=block,
        BLOCK_PARTS=max(2, triton.next_power_of_2(into.num_parts)),
        # an index of spans is counted like a digit
        BLOCK_SPANS=max(32, triton.next_power_of_2(most_spans)),
        num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
