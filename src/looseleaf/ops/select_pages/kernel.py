"""Selection of pages on the device: one program a row and KV head, in two rounds of few numbers.

The pages that are wanted lie in as many runs of neighbours as there are pages wanted: those with
the largest maxima. So the runs are chosen first, up to twice as many since that takes fewer cuts,
then the pages of those runs.

A score's bits, with those of negative numbers turned over, order as integers do. The number that
just enough others reach is found by narrowing an interval, two cuts at a time, until no more and
no fewer than wanted stand above it: there is seldom need to look at the last bits."""

import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.ops.select_pages.candidate_list import (
    CandidateList,
    ChosenPages,
    PageScores,
    SeenPages,
)

# the key of -inf, that of inf, which what must be chosen has, and a key below all others
_NOTHING = tl.constexpr(-2139095041)
_MUST = tl.constexpr(0x7F800000)
_ABSENT = tl.constexpr(-2147483648)
# programs that leave room for those of the next kernel
FEW_PROGRAMS = 32
# pages that one step may add to a row whatever they score
MOST_NEW = tl.constexpr(16)


@triton.jit
def _keys(scores, ordinal, exists):
    """The scores as integers that order alike; least of all what does not exist."""
    score = tl.load(scores + ordinal, mask=exists, other=0.0)
    # there are two zeros, and they are equal
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), _ABSENT)


@triton.jit
def _threshold(keys, limit, most, low):
    """The largest key that ``limit`` or more keys reach, or any that ``limit`` to ``most`` reach;
    and how many that is. ``limit`` or more reach ``low``."""
    # an infinite score says nothing of where the others lie: half of all cuts would be above them
    high = tl.max(tl.where(keys < _MUST, keys, _ABSENT), 0).to(tl.int64) + 1
    must = tl.sum((keys >= _MUST).to(tl.int32), 0)
    low = low.to(tl.int64)
    if must >= limit:
        low, high = low * 0 + _MUST, high * 0 + _MUST + 1
    reached = tl.sum((keys >= low.to(tl.int32)).to(tl.int32), 0)
    while (high - low > 1) & (reached > most):
        step = tl.maximum((high - low) // 3, 1)
        one, two = low + step, tl.minimum(low + 2 * step, high)
        reach_one, reach_two = keys >= one.to(tl.int32), keys >= two.to(tl.int32)
        if keys.shape[0] <= 32768:
            # two counts in one sum, which processors have an instruction for
            counts = tl.sum(reach_one.to(tl.int32) + (reach_two.to(tl.int32) << 16), 0)
            first, second = counts & 65535, (counts >> 16) & 65535
        else:
            first = tl.sum(reach_one.to(tl.int32), 0)
            second = tl.sum(reach_two.to(tl.int32), 0)
        if first < limit:
            high = one
        elif second < limit:
            low, high, reached = one, two, first
        else:
            low, reached = two, second
    return low.to(tl.int32), reached


@triton.jit
def _largest(keys, limit, most, low):
    """Which are the ``limit`` largest keys, which ``low`` does not exceed, or up to ``most`` that
    hold them; of equal ones the first, and none that is -inf. And the least of them, or a little
    less."""
    threshold, reached = _threshold(keys, limit, most, low)
    taken = keys >= threshold
    if reached > most:
        equal = (keys == threshold).to(tl.int32)
        above = tl.sum((keys > threshold).to(tl.int32), 0)
        nth_equal = tl.cumsum(equal, 0) - equal
        taken = (keys > threshold) | ((equal > 0) & (nth_equal < limit - above))
    return taken & (keys > _NOTHING), threshold


@triton.jit
def _largest_pages(
    scores, maxima, pages, starts, page_indices, page_positions, room, count, limit,
    RUN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_RUNS: tl.constexpr,
):  # fmt: skip
    """Ordinals of the runs that hold the ``limit`` largest scores, which of them these are, and the
    pages and starts of all of them, which come with the scores; the two lists, with ``room`` each,
    keep the runs meanwhile."""
    lane = tl.arange(0, BLOCK)
    low = count * 0 + _ABSENT
    if RUN == 1:
        ordinal, exists = lane, lane < count
    else:
        o_run, runs = tl.arange(0, BLOCK_RUNS), (count + RUN - 1) // RUN
        keys = _keys(maxima, o_run, o_run < runs)
        least = tl.min(tl.where(o_run < runs, keys, 2147483647), 0)
        # no more than there are lanes and places for
        most = tl.minimum(BLOCK // RUN, 2 * room)
        taken_run, low = _largest(keys, tl.minimum(limit, runs), most, least)
        if runs < limit:
            # there are fewer runs than pages wanted, so their maxima say nothing
            low = count * 0 + _ABSENT
        taken_run = taken_run.to(tl.int32)
        o_to = tl.cumsum(taken_run, 0) - taken_run
        tl.store(page_indices + o_to, o_run, mask=(taken_run > 0) & (o_to < room))
        tl.store(page_positions + o_to - room, o_run, mask=(taken_run > 0) & (o_to >= room))
        tl.debug_barrier()
        which = lane // RUN
        there = which < tl.sum(taken_run, 0)
        run = tl.load(page_indices + which, mask=there & (which < room), other=0)
        run += tl.load(page_positions + which - room, mask=there & (which >= room), other=0)
        ordinal = run * RUN + lane % RUN
        exists = there & (ordinal < count)
    keys = _keys(scores, ordinal, exists)
    page = tl.load(pages + ordinal, mask=exists, other=0)
    position = tl.load(starts + ordinal, mask=exists, other=0)
    limit = tl.minimum(limit, tl.sum(exists.to(tl.int32), 0))
    taken, _ = _largest(keys, limit, limit, low)
    return ordinal, taken, page, position


@triton.jit
def _store_items(
    place, first_page, chosen, in_span, spans_of_row,
    span_offset, span_bound, span_mask, item_page_indptr, entry_offset, entry_bound, entry_mask,
    most_spans, num_parts, least_pages,
    MANY_SPANS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """The items of ``chosen`` pages from ``first_page`` on: cut in parts, and where a span begins;
    ``in_span`` of them lie in each span."""
    num_items = num_parts + most_spans - 1
    item, entry = place * (num_items + 1), place * num_items
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
            span_mask, entry_offset, entry_bound, entry_mask, WINDOW,
        )  # fmt: skip
    tl.store(item_page_indptr + item + part_rank, first_page + part_cut, mask=m_part)
    tl.store(item_page_indptr + item + num_items, first_page + chosen)
    _store_spans(
        spans_of_row + part_span, entry + part_rank, m_part, span_offset, span_bound, span_mask,
        entry_offset, entry_bound, entry_mask, WINDOW,
    )  # fmt: skip


@triton.jit
def _store_spans(
    span, nth, mask, span_offset, span_bound, span_mask, entry_offset, entry_bound, entry_mask,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """What the entries of items know of their spans."""
    offset = tl.load(span_offset + span, mask=mask)
    bound = tl.load(span_bound + span, mask=mask)
    first_word = tl.load(span_mask + span, mask=mask)
    for age in tl.static_range(WINDOW):
        entry = nth * WINDOW + age
        tl.store(entry_offset + entry, offset, mask=mask)
        tl.store(entry_bound + entry, bound, mask=mask)
        tl.store(entry_mask + entry, first_word, mask=mask)


@triton.jit
def _mark(registers, ordinal, taken, first_new, count, to, chosen_seen, again, BLOCK: tl.constexpr):
    """Shift all registers of a row and mark what is read, and those from ``first_new`` on; what
    stood in those of ``ordinal`` goes ``to`` its place."""
    was = tl.load(registers + ordinal, mask=taken, other=0).to(tl.int32)
    tl.store(chosen_seen + to, tl.where(again, 255, was), mask=taken)
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        some = start + tl.arange(0, BLOCK)
        m_some = (some < count) & (not again)
        register = tl.load(registers + some, mask=m_some, other=0).to(tl.int32)
        marked = (register << 1) | (some >= first_new).to(tl.int32)
        tl.store(registers + some, marked.to(tl.uint8), mask=m_some)
    tl.debug_barrier()
    tl.store(registers + ordinal, ((was << 1) | 1).to(tl.uint8), mask=taken & (not again))


@triton.jit
def _select_pages_kernel(
    scores, maxima, num_rows, num_pages, limits, pages, starts, spans,
    span_offset, span_bound, span_mask,
    item_page_indptr, page_indices, page_positions, entry_offset, entry_bound, entry_mask,
    registers, booked, row_slot, newly_sealed, candidate_row, row_positions, chosen_seen,
    stride_slot, stride_register_head,
    most, most_runs, most_spans, room, num_parts, least_pages,
    NUM_KV_HEADS: tl.constexpr, RUN: tl.constexpr, MANY_SPANS: tl.constexpr,
    CHAINED: tl.constexpr, EARLY: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_RUNS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED and EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    place = row * NUM_KV_HEADS + head
    there = row < tl.load(num_rows)
    count, limit, first_new = place * 0, place * 0, place * 0
    if there:
        count = tl.load(num_pages + row)
        limit = tl.minimum(tl.load(limits + row), count)
        first_new = count
        if registers is not None:
            first_new -= tl.load(newly_sealed + row)
    await_previous(CHAINED)
    if there:
        o_row, first_page = row.to(tl.int64) * most, place * room
        ordinal, taken, page, position = _largest_pages(
            scores + place.to(tl.int64) * most, maxima + place.to(tl.int64) * most_runs,
            pages + o_row, starts + o_row, page_indices + first_page, page_positions + first_page,
            room, count, limit, RUN, BLOCK, BLOCK_RUNS,
        )  # fmt: skip
        # what comes next would take room before, unless there is enough
        start_next(CHAINED and not EARLY)
        # those that are new come last, whatever they score
        taken = taken & (ordinal < first_new)
        ones = taken.to(tl.int32)
        chosen = tl.sum(ones, 0)
        to = first_page + tl.cumsum(ones, 0) - ones
        # every warp has read the runs that stand where the pages go
        tl.debug_barrier()
        tl.store(page_indices + to, page, mask=taken)
        tl.store(page_positions + to, position, mask=taken)
        in_span = tl.zeros((BLOCK_SPANS,), tl.int32)
        if MANY_SPANS:
            span = tl.load(spans + o_row + ordinal, mask=taken, other=0)
            in_span = tl.histogram(span, BLOCK_SPANS, mask=taken)
        if registers is not None:
            slot = tl.load(row_slot + row).to(tl.int64)
            here = tl.load(row_positions + tl.load(candidate_row + row))
            p_booked = booked + slot * NUM_KV_HEADS + head
            # a step that was computed in vain is marked already
            again = tl.load(p_booked) == here
            # every warp has looked before one of them books the step
            tl.debug_barrier()
            tl.store(p_booked, here.to(tl.int64))
            own = registers + slot * stride_slot + head * stride_register_head
            o_new = tl.arange(0, MOST_NEW)
            m_new, new = first_new + o_new < count, o_row + first_new + o_new
            to_new = first_page + chosen + o_new
            was = tl.load(own + first_new + o_new, mask=m_new, other=0).to(tl.int32)
            tl.store(chosen_seen + to_new, tl.where(again, 255, was), mask=m_new)
            tl.store(page_indices + to_new, tl.load(pages + new, mask=m_new), mask=m_new)
            tl.store(page_positions + to_new, tl.load(starts + new, mask=m_new), mask=m_new)
            if MANY_SPANS:
                span = tl.load(spans + new, mask=m_new, other=0)
                in_span += tl.histogram(span, BLOCK_SPANS, mask=m_new)
            _mark(own, ordinal, taken, first_new, count, to, chosen_seen, again, BLOCK)
            chosen += count - first_new
        _store_items(
            place, first_page, chosen, in_span, row * most_spans,
            span_offset, span_bound, span_mask,
            item_page_indptr, entry_offset, entry_bound, entry_mask,
            most_spans, num_parts, least_pages, MANY_SPANS, WINDOW, BLOCK_PARTS, BLOCK_SPANS,
        )  # fmt: skip


def select_pages_triton(
    scores: PageScores, candidates: CandidateList, into: ChosenPages, seen: SeenPages | None
) -> None:
    """See `looseleaf.ops.select_pages`."""
    rows, num_kv_heads, most = scores.each.shape
    most_spans, most_runs = candidates.span_offset.shape[1], scores.maxima.shape[2]
    work = into.work
    assert all(x.is_contiguous() for x in (*scores[:2], candidates.pages)), "lists are contiguous"
    chained, run = chains(scores.each), scores.run
    block = triton.next_power_of_2(most if run == 1 else min(most, 2 * into.room * run))
    block_runs = max(32, triton.next_power_of_2(most_runs))
    kept: tuple[Tensor | None, ...] = (None,) * 7
    strides: tuple[int, ...] = (0, 0)
    if seen is not None:
        kept = (
            seen.registers, seen.booked, seen.slot, seen.newly_sealed, candidates.row,
            work.row_positions, seen.chosen,
        )  # fmt: skip
        strides = seen.registers.stride()[:2]
    _select_pages_kernel[(rows, num_kv_heads)](
        *scores[:2], candidates.num_rows, candidates.num_pages, candidates.limit,
        candidates.pages, candidates.starts, candidates.spans, candidates.span_offset,
        candidates.span_bound, candidates.span_mask, work.item_page_indptr, work.page_indices,
        work.page_positions, work.entry_offset, work.entry_bound, work.entry_mask,
        *kept, *strides, most, most_runs, most_spans, into.room, into.num_parts, into.least_pages,
        NUM_KV_HEADS=num_kv_heads, RUN=run, MANY_SPANS=most_spans > 1, CHAINED=chained,
        EARLY=rows * num_kv_heads <= FEW_PROGRAMS,
        WINDOW=into.window, BLOCK=max(32, block),
        BLOCK_RUNS=block_runs,
        BLOCK_PARTS=max(2, triton.next_power_of_2(into.num_parts)),
        # an index of spans is counted like a digit
        BLOCK_SPANS=max(32, triton.next_power_of_2(most_spans)),
        num_warps=max(4, min(16, max(block, block_runs) // 256)),
        enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
