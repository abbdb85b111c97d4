"""Device functions of the Hopper kernel: how a computing group walks over the spans of a unit.

To begin a span costs what no product hides: its numbers, the rows turned to its frame, the first
scores and their exponentials. So the numbers are asked for one span ahead, and the rows turn beside
the last product of the span before. Parts of tiles cross few borders: there rows turn where a span
begins, since a second copy of the turning costs a program more than it hides (docs/log.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from looseleaf.ops.hopper.tiles.kernel import fold_span, positions_of_unit, turn_unit

# what rows that are not there see at most: all of any span
_EVERYTHING = gl.constexpr(1073741824)


@gluon.jit
def _numbers(lists, span, end, before, latest, last_patch, MASKED: gl.constexpr):
    """First page of a span, its pages, slots that are read of it, offset, length, whether it is a
    patch, and where its bitmap begins; past the ``end`` nothing is read."""
    known = span < end
    first_page = gl.load(lists[2] + span, mask=known, other=0)
    num_pages = gl.load(lists[2] + span + 1, mask=known, other=0) - first_page
    offset = gl.load(lists[3] + span, mask=known, other=0)
    length = gl.load(lists[4] + span, mask=known, other=0)
    num_slots = gl.minimum(length, latest - offset + 1)
    explicit, first_word = 0, -1
    if MASKED:
        # of a patch a row sees as many slots as stand at its position or before
        explicit = gl.load(lists[5] + span, mask=known, other=0)
        first_word = gl.load(lists[6] + span, mask=known, other=-1)
        num_slots += explicit * (last_patch - num_slots)
    num_slots = gl.where(span == end - 1, gl.minimum(num_slots, before), num_slots)
    return first_page, num_pages, num_slots, offset, length, explicit, first_word


@gluon.jit
def read_spans(
    data, unit, spans, rows, state, count, WORKER: gl.constexpr, WORKERS: gl.constexpr,
    MASKED: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, INTERLEAVED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    AWAITED: gl.constexpr, BY_HEADS: gl.constexpr, IN_PARTS: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The running state of 64 packed rows with what their unit reads in it, and the tiles read so
    far; waits for the queries."""
    queries, table, _, q_tiles, tiles, barriers, lists = data
    q_tile = q_tiles.index(WORKER)
    first, local, num_packed, _ = unit
    begin, end, skip, before, last = spans
    m_row, place, true = rows
    position = positions_of_unit(lists, unit, GROUP, BY_HEADS)
    # rows rise by position, and so does what they see of a patch
    first_row, there = first + local // GROUP, local < num_packed
    earliest = gl.load(lists[7] + first_row, mask=there, other=_EVERYTHING)
    latest = gl.load(lists[7] + last)
    of_patch, least_patch, last_patch = 0, 0, 0
    if MASKED:
        of_patch = gl.load(lists[9] + place, mask=m_row, other=0)
        least_patch = gl.load(lists[9] + first_row, mask=there, other=_EVERYTHING)
        last_patch = gl.load(lists[9] + last)
    following = _numbers(lists, begin, end, before, latest, last_patch, MASKED)
    # the lists are the host's: they are asked for before the wait
    if not AWAITED:
        gdc_wait()
    turned = -1
    for span in range(begin, end):
        first_page, num_pages, num_slots, offset, length, explicit, first_word = following
        following = _numbers(lists, span + 1, end, before, latest, last_patch, MASKED)
        start = gl.where(span == begin, skip, 0)
        if num_slots > start:
            # before which slot each row sees the keys, and before which all rows do
            bound = gl.where(m_row, gl.minimum(true - offset + 1, length), 0)
            plain_end = gl.minimum(earliest - offset + 1, length)
            if MASKED:
                bound += explicit * (of_patch - bound)
                plain_end += explicit * (least_patch - plain_end)
            plain_end = gl.minimum(plain_end, num_pages * PAGE_SIZE)
            if IN_PARTS or turned != span:
                turn_unit(
                    q_tile, unit, position - offset, queries, table,
                    GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS,
                )  # fmt: skip
            goes_on = following[2] > 0
            ahead = goes_on, unit, position - following[3], queries, table
            state, count = fold_span(
                q_tile, tiles, barriers, state, count, lists,
                (first_page, start, num_slots, plain_end, bound, num_slots, first_word), ahead,
                WORKER, False, MASKED, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, WORKERS, not IN_PARTS,
            )  # fmt: skip
            turned = gl.where(goes_on, span + 1, -1)
    return state, count
