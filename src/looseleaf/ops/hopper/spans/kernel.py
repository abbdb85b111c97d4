"""The loop of a consumer warpgroup over the spans of a unit.

No product hides the start of a span: its numbers, the rotation of the rows, the first scores and
exponentials. The numbers are therefore loaded one span ahead, and rows are rotated beside the last
product of the previous span. Parts of tiles cross few borders and rotate at the start of a span: a
second copy of the rotation costs more than it hides (docs/log.md)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from looseleaf.ops.hopper.tiles.kernel import fold_span, positions_of_unit, rotate_unit

# bound of rows that do not exist: all keys of any span
_NO_BOUND = gl.constexpr(1073741824)


@gluon.jit
def _numbers(lists, span, end, end_slot, latest, last_patch, MASKED: gl.constexpr):
    """First page of a span, pages, slots to read, offset, length, whether it is a patch, first mask
    word.

    Nothing is loaded from ``end`` on."""
    exists = span < end
    first_page = gl.load(lists[2] + span, mask=exists, other=0)
    num_pages = gl.load(lists[2] + span + 1, mask=exists, other=0) - first_page
    offset = gl.load(lists[3] + span, mask=exists, other=0)
    length = gl.load(lists[4] + span, mask=exists, other=0)
    num_slots = gl.minimum(length, latest - offset + 1)
    explicit, first_word = 0, -1
    if MASKED:
        # in a patch, a row sees the slots at its position or before
        explicit = gl.load(lists[5] + span, mask=exists, other=0)
        first_word = gl.load(lists[6] + span, mask=exists, other=-1)
        num_slots += explicit * (last_patch - num_slots)
    num_slots = gl.where(span == end - 1, gl.minimum(num_slots, end_slot), num_slots)
    return first_page, num_pages, num_slots, offset, length, explicit, first_word


@gluon.jit
def read_spans(
    data, unit, spans, rows, state, count, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    MASKED: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, INTERLEAVED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    AWAITED: gl.constexpr, BY_HEADS: gl.constexpr, IN_PARTS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The running state of 64 packed rows after all spans of a unit, and the count of tiles so far.

    Waits for the queries."""
    queries, table, _, q_tiles, tiles, barriers, lists = data
    q_tile = q_tiles.index(CONSUMER)
    first, local, num_packed, _ = unit
    begin, end, start_slot, end_slot, last = spans
    m_row, row, row_position = rows
    position = positions_of_unit(lists, unit, GROUP, BY_HEADS)
    # rows rise by position, and so do their bounds in a patch
    first_row, exists = first + local // GROUP, local < num_packed
    earliest = gl.load(lists[7] + first_row, mask=exists, other=_NO_BOUND)
    latest = gl.load(lists[7] + last)
    of_patch, least_patch, last_patch = 0, 0, 0
    if MASKED:
        of_patch = gl.load(lists[9] + row, mask=m_row, other=0)
        least_patch = gl.load(lists[9] + first_row, mask=exists, other=_NO_BOUND)
        last_patch = gl.load(lists[9] + last)
    next_numbers = _numbers(lists, begin, end, end_slot, latest, last_patch, MASKED)
    # the host writes the lists, so they are loaded before the wait
    if not AWAITED:
        gdc_wait()
    rotated_span = -1
    for span in range(begin, end):
        first_page, num_pages, num_slots, offset, length, explicit, first_word = next_numbers
        next_numbers = _numbers(lists, span + 1, end, end_slot, latest, last_patch, MASKED)
        start = gl.where(span == begin, start_slot, 0)
        if num_slots > start:
            # slots that each row sees, and slots that all rows see
            bound = gl.where(m_row, gl.minimum(row_position - offset + 1, length), 0)
            plain_end = gl.minimum(earliest - offset + 1, length)
            if MASKED:
                bound += explicit * (of_patch - bound)
                plain_end += explicit * (least_patch - plain_end)
            plain_end = gl.minimum(plain_end, num_pages * PAGE_SIZE)
            if IN_PARTS or rotated_span != span:
                rotate_unit(
                    q_tile, unit, position - offset, queries, table,
                    GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS,
                )  # fmt: skip
            has_next = next_numbers[2] > 0
            next_rotation = has_next, unit, position - next_numbers[3], queries, table
            state, count = fold_span(
                q_tile, tiles, barriers, state, count, lists,
                (first_page, start, num_slots, plain_end, bound, num_slots, first_word),
                next_rotation,
                CONSUMER, False, MASKED, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, CONSUMERS, not IN_PARTS,
            )  # fmt: skip
            rotated_span = gl.where(has_next, span + 1, -1)
    return state, count
