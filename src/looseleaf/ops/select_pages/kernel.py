"""Selection of pages on the device: one program per row and KV head, in two rounds over few scores.

The k selected pages lie in at most k runs of consecutive pages: the runs with the k largest maxima.
The first round selects runs, up to twice as many, since a loose limit needs fewer cuts. The second
round selects pages of these runs.

The bits of floats, with those of negative numbers inverted, order as integers. The threshold is
found by interval search with two cuts per step. The search ends as soon as the count above the
threshold is right; the last bits rarely matter."""

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

# keys of -inf, of inf (forced pages), and a key below all others
_NOTHING = tl.constexpr(-2139095041)
_MUST = tl.constexpr(0x7F800000)
_ABSENT = tl.constexpr(-2147483648)
# programs of a launch that leave SMs free for the next kernel
FEW_PROGRAMS = 32
# most pages that a step may add to a row beyond the limit
MOST_NEW = tl.constexpr(16)


@triton.jit
def _keys(scores, ordinal, exists):
    """Scores as integers in the same order; candidates that do not exist get the least key."""
    score = tl.load(scores + ordinal, mask=exists, other=0.0)
    # +0 and -0 are equal
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), _ABSENT)


@triton.jit
def _threshold(keys, limit, most, low):
    """The largest key that ``limit`` or more keys reach, or any that ``limit`` to ``most`` keys
    reach.

    Also returns the number of keys that reach it. At least ``limit`` keys reach ``low``."""
    # finite scores bound the search: from inf, half of all cuts would be too high
    high = tl.max(tl.where(keys < _MUST, keys, _ABSENT), 0).to(tl.int64) + 1
    must = tl.sum((keys >= _MUST).to(tl.int32), 0)
    low = low.to(tl.int64)
    if must >= limit:
        low, high = low * 0 + _MUST, high * 0 + _MUST + 1
    reached = tl.sum((keys >= low.to(tl.int32)).to(tl.int32), 0)
    while (high - low > 1) & (reached > most):
        step = tl.maximum((high - low) // 3, 1)
        low_cut, high_cut = low + step, tl.minimum(low + 2 * step, high)
        reach_low, reach_high = keys >= low_cut.to(tl.int32), keys >= high_cut.to(tl.int32)
        if keys.shape[0] <= 32768:
            # two 16-bit counts in one integer sum
            counts = tl.sum(reach_low.to(tl.int32) + (reach_high.to(tl.int32) << 16), 0)
            first, second = counts & 65535, (counts >> 16) & 65535
        else:
            first = tl.sum(reach_low.to(tl.int32), 0)
            second = tl.sum(reach_high.to(tl.int32), 0)
        if first < limit:
            high = low_cut
        elif second < limit:
            low, high, reached = low_cut, high_cut, first
        else:
            low, reached = high_cut, second
    return low.to(tl.int32), reached


@triton.jit
def _largest(keys, limit, most, low):
    """Mask of the ``limit`` largest keys, or of up to ``most`` keys that include them; and a lower
    bound.

    Of equal keys the first win; -inf is never selected. All selected keys are at least ``low``."""
    threshold, reached = _threshold(keys, limit, most, low)
    selected = keys >= threshold
    if reached > most:
        equal = (keys == threshold).to(tl.int32)
        above = tl.sum((keys > threshold).to(tl.int32), 0)
        nth_equal = tl.cumsum(equal, 0) - equal
        selected = (keys > threshold) | ((equal > 0) & (nth_equal < limit - above))
    return selected & (keys > _NOTHING), threshold


@triton.jit
def _largest_pages(
    scores, maxima, pages, starts, page_indices, page_positions, room, count, limit,
    RUN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_RUNS: tl.constexpr,
):  # fmt: skip
    """Ordinals of the pages in the best runs, the mask of the ``limit`` largest, and their pages
    and starts.

    The output lists, with ``room`` elements each, hold the runs in the meantime."""
    lane = tl.arange(0, BLOCK)
    low = count * 0 + _ABSENT
    if RUN == 1:
        ordinal, exists = lane, lane < count
    else:
        o_run, runs = tl.arange(0, BLOCK_RUNS), (count + RUN - 1) // RUN
        keys = _keys(maxima, o_run, o_run < runs)
        least = tl.min(tl.where(o_run < runs, keys, 2147483647), 0)
        # limited by the lanes of the block and by the room of both lists
        most = tl.minimum(BLOCK // RUN, 2 * room)
        selected_run, low = _largest(keys, tl.minimum(limit, runs), most, least)
        if runs < limit:
            # with fewer runs than selected pages the maxima give no bound
            low = count * 0 + _ABSENT
        selected_run = selected_run.to(tl.int32)
        target = tl.cumsum(selected_run, 0) - selected_run
        tl.store(page_indices + target, o_run, mask=(selected_run > 0) & (target < room))
        tl.store(page_positions + target - room, o_run, mask=(selected_run > 0) & (target >= room))
        tl.debug_barrier()
        nth_run = lane // RUN
        m_run = nth_run < tl.sum(selected_run, 0)
        run = tl.load(page_indices + nth_run, mask=m_run & (nth_run < room), other=0)
        run += tl.load(page_positions + nth_run - room, mask=m_run & (nth_run >= room), other=0)
        ordinal = run * RUN + lane % RUN
        exists = m_run & (ordinal < count)
    keys = _keys(scores, ordinal, exists)
    page = tl.load(pages + ordinal, mask=exists, other=0)
    position = tl.load(starts + ordinal, mask=exists, other=0)
    limit = tl.minimum(limit, tl.sum(exists.to(tl.int32), 0))
    selected, _ = _largest(keys, limit, limit, low)
    return ordinal, selected, page, position


@triton.jit
def _store_items(
    pair, first_page, chosen, in_span, spans_of_row,
    span_offset, span_bound, span_mask, item_page_indptr, entry_offset, entry_bound, entry_mask,
    most_spans, num_parts, least_pages,
    MANY_SPANS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_SPANS: tl.constexpr,
):  # fmt: skip
    """Writes the items of ``chosen`` pages from ``first_page`` on, cut into parts and at borders of
    spans.

    ``in_span`` counts the selected pages of each span."""
    num_items = num_parts + most_spans - 1
    item, entry = pair * (num_items + 1), pair * num_items
    pages_per_part = tl.maximum((chosen + num_parts - 1) // num_parts, least_pages)
    o_part = tl.arange(0, BLOCK_PARTS)
    m_part = o_part < num_parts
    part_cut = tl.minimum(o_part * pages_per_part, chosen)
    part_rank, part_span = o_part, tl.zeros_like(o_part)
    if MANY_SPANS:
        # rank of each part and each span among all cuts
        o_span = tl.arange(0, BLOCK_SPANS)
        m_span = (o_span > 0) & (o_span < most_spans)
        span_cut = tl.cumsum(in_span, 0) - in_span
        is_earlier = m_span[None, :] & (span_cut[None, :] < part_cut[:, None])  # [parts, spans]
        part_rank = o_part + tl.sum(is_earlier.to(tl.int32), 1)
        part_is_earlier = m_part[:, None] & (part_cut[:, None] <= span_cut[None, :])
        span_rank = o_span - 1 + tl.sum(part_is_earlier.to(tl.int32), 0)
        is_begun = m_span[None, :] & (span_cut[None, :] <= part_cut[:, None])
        part_span = tl.sum(is_begun.to(tl.int32), 1)
        is_begun_span = m_span[None, :] & (span_cut[None, :] <= span_cut[:, None])
        first_span = tl.sum(is_begun_span.to(tl.int32), 1)
        tl.store(item_page_indptr + item + span_rank, first_page + span_cut, mask=m_span)
        _store_entries(
            spans_of_row + first_span, entry + span_rank, m_span, span_offset, span_bound,
            span_mask, entry_offset, entry_bound, entry_mask, WINDOW,
        )  # fmt: skip
    tl.store(item_page_indptr + item + part_rank, first_page + part_cut, mask=m_part)
    tl.store(item_page_indptr + item + num_items, first_page + chosen)
    _store_entries(
        spans_of_row + part_span, entry + part_rank, m_part, span_offset, span_bound, span_mask,
        entry_offset, entry_bound, entry_mask, WINDOW,
    )  # fmt: skip


@triton.jit
def _store_entries(
    span, item, mask, span_offset, span_bound, span_mask, entry_offset, entry_bound, entry_mask,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Writes offset, bound and bitmap of spans to the entries of items."""
    offset = tl.load(span_offset + span, mask=mask)
    bound = tl.load(span_bound + span, mask=mask)
    first_word = tl.load(span_mask + span, mask=mask)
    for age in tl.static_range(WINDOW):
        entry = item * WINDOW + age
        tl.store(entry_offset + entry, offset, mask=mask)
        tl.store(entry_bound + entry, bound, mask=mask)
        tl.store(entry_mask + entry, first_word, mask=mask)


@triton.jit
def _mark(
    registers,
    ordinal,
    selected,
    first_new,
    count,
    target,
    chosen_seen,
    is_repeated,
    BLOCK: tl.constexpr,
):
    """Shifts the registers of a row and marks selected and new pages as read.

    The previous registers of ``ordinal`` are stored at ``to`` in ``chosen_seen``."""
    previous = tl.load(registers + ordinal, mask=selected, other=0).to(tl.int32)
    tl.store(chosen_seen + target, tl.where(is_repeated, 255, previous), mask=selected)
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        candidate = start + tl.arange(0, BLOCK)
        m_candidate = (candidate < count) & (not is_repeated)
        register = tl.load(registers + candidate, mask=m_candidate, other=0).to(tl.int32)
        marked = (register << 1) | (candidate >= first_new).to(tl.int32)
        tl.store(registers + candidate, marked.to(tl.uint8), mask=m_candidate)
    tl.debug_barrier()
    tl.store(
        registers + ordinal,
        ((previous << 1) | 1).to(tl.uint8),
        mask=selected & (not is_repeated),
    )


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
    pair = row * NUM_KV_HEADS + head
    m_run = row < tl.load(num_rows)
    count, limit, first_new = pair * 0, pair * 0, pair * 0
    if m_run:
        count = tl.load(num_pages + row)
        limit = tl.minimum(tl.load(limits + row), count)
        first_new = count
        if registers is not None:
            first_new -= tl.load(newly_sealed + row)
    await_previous(CHAINED)
    if m_run:
        o_row, first_page = row.to(tl.int64) * most, pair * room
        ordinal, selected, page, position = _largest_pages(
            scores + pair.to(tl.int64) * most, maxima + pair.to(tl.int64) * most_runs,
            pages + o_row, starts + o_row, page_indices + first_page, page_positions + first_page,
            room, count, limit, RUN, BLOCK, BLOCK_RUNS,
        )  # fmt: skip
        # with many programs, an early start of the next kernel would take SMs from this one
        start_next(CHAINED and not EARLY)
        # new pages come last and are selected regardless of their score
        selected = selected & (ordinal < first_new)
        ones = selected.to(tl.int32)
        chosen = tl.sum(ones, 0)
        target = first_page + tl.cumsum(ones, 0) - ones
        # the lists still hold runs, which every warp must have read
        tl.debug_barrier()
        tl.store(page_indices + target, page, mask=selected)
        tl.store(page_positions + target, position, mask=selected)
        in_span = tl.zeros((BLOCK_SPANS,), tl.int32)
        if MANY_SPANS:
            span = tl.load(spans + o_row + ordinal, mask=selected, other=0)
            in_span = tl.histogram(span, BLOCK_SPANS, mask=selected)
        if registers is not None:
            slot = tl.load(row_slot + row).to(tl.int64)
            position_now = tl.load(row_positions + tl.load(candidate_row + row))
            p_booked = booked + slot * NUM_KV_HEADS + head
            # the history already has the position of a repeated step
            is_repeated = tl.load(p_booked) == position_now
            # every warp must read the position before one of them updates it
            tl.debug_barrier()
            tl.store(p_booked, position_now.to(tl.int64))
            row_registers = registers + slot * stride_slot + head * stride_register_head
            o_new = tl.arange(0, MOST_NEW)
            m_new, new = first_new + o_new < count, o_row + first_new + o_new
            to_new = first_page + chosen + o_new
            previous = tl.load(row_registers + first_new + o_new, mask=m_new, other=0).to(tl.int32)
            tl.store(chosen_seen + to_new, tl.where(is_repeated, 255, previous), mask=m_new)
            tl.store(page_indices + to_new, tl.load(pages + new, mask=m_new), mask=m_new)
            tl.store(page_positions + to_new, tl.load(starts + new, mask=m_new), mask=m_new)
            if MANY_SPANS:
                span = tl.load(spans + new, mask=m_new, other=0)
                in_span += tl.histogram(span, BLOCK_SPANS, mask=m_new)
            _mark(
                row_registers,
                ordinal,
                selected,
                first_new,
                count,
                target,
                chosen_seen,
                is_repeated,
                BLOCK,
            )
            chosen += count - first_new
        _store_items(
            pair, first_page, chosen, in_span, row * most_spans,
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
    seen_arguments: tuple[Tensor | None, ...] = (None,) * 7
    strides: tuple[int, ...] = (0, 0)
    if seen is not None:
        seen_arguments = (
            seen.registers, seen.booked, seen.slot, seen.newly_sealed, candidates.row,
            work.row_positions, seen.chosen,
        )  # fmt: skip
        strides = seen.registers.stride()[:2]
    _select_pages_kernel[(rows, num_kv_heads)](
        *scores[:2], candidates.num_rows, candidates.num_pages, candidates.limit,
        candidates.pages, candidates.starts, candidates.spans, candidates.span_offset,
        candidates.span_bound, candidates.span_mask, work.item_page_indptr, work.page_indices,
        work.page_positions, work.entry_offset, work.entry_bound, work.entry_mask,
        *seen_arguments, *strides, most, most_runs, most_spans,
        into.room, into.num_parts, into.least_pages,
        NUM_KV_HEADS=num_kv_heads, RUN=run, MANY_SPANS=most_spans > 1, CHAINED=chained,
        EARLY=rows * num_kv_heads <= FEW_PROGRAMS,
        WINDOW=into.window, BLOCK=max(32, block),
        BLOCK_RUNS=block_runs,
        BLOCK_PARTS=max(2, triton.next_power_of_2(into.num_parts)),
        # tl.histogram needs at least 32 bins
        BLOCK_SPANS=max(32, triton.next_power_of_2(most_spans)),
        num_warps=max(4, min(16, max(block, block_runs) // 256)),
        enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
