"""Device functions of the Hopper kernel: the units that its programs walk over, and what its
fetching warp does.

A unit is a KV head of an item of a work list, or of a unit of a span list, which may read a part of
the keys. Lists are tuples of arrays, five of a work list, eight of a span list and ten of one with
patches, as `looseleaf.ops.hopper.attention` has them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.hopper.barriers.kernel import await_back
from looseleaf.ops.hopper.tiles.kernel import HALF, ROWS

# what Triton 3.6 calls by other names than later versions
OLD_NAMES = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_tile = tma.async_copy_global_to_shared if OLD_NAMES.value else tma.async_load


@gluon.jit
def seen_as(tiles, COUNT: gl.constexpr, LENGTH: gl.constexpr, SHARED: gl.constexpr):
    """The same shared memory as ``COUNT`` tiles of ``LENGTH`` rows."""
    if OLD_NAMES:
        return tiles._reinterpret(tiles.dtype, [COUNT, LENGTH, HALF], SHARED)
    else:
        return tiles.reinterpret(tiles.dtype, [COUNT, LENGTH, HALF], SHARED)


@gluon.jit
def unit_of(
    lists, unit, there, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Head, first row (or entry), packed rows and spans of a unit; from which slot on it reads its
    first span, and before which its last. One that is not ``there`` has no rows."""
    if DECODE:
        item = gl.load(lists[0]) + unit // NUM_KV_HEADS
        kv_head = unit % NUM_KV_HEADS
        p_item = lists[2] + item * 8
        first = gl.load(p_item + 2)
        num_packed = gl.load(p_item + 3) * GROUP
        only_head = gl.load(p_item + 4)
        num_packed = gl.where((only_head < 0) | (only_head == kv_head), num_packed, 0)
        return kv_head, first, num_packed, item, item + 1, 0, 2147483647
    else:
        p_unit = lists[1] + unit // NUM_KV_HEADS * 8
        first, num_packed = gl.load(p_unit), gl.load(p_unit + 1) * GROUP
        begin, end = gl.load(p_unit + 2), gl.load(p_unit + 3)
        skip, before = gl.load(p_unit + 4), gl.load(p_unit + 5)
        num_packed = gl.where(there, num_packed, 0)
        return unit % NUM_KV_HEADS, first, num_packed, begin, end, skip, before


@gluon.jit
def num_units_of(lists, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr):
    """How many units all programs have to do."""
    if DECODE:
        return (gl.load(lists[1]) - gl.load(lists[0])) * NUM_KV_HEADS
    else:
        return gl.load(lists[0]) * NUM_KV_HEADS


@gluon.jit
def num_places_of(num_units, DECODE: gl.constexpr):
    """How many places units are dealt to, of which the last may stay empty."""
    if DECODE:
        return num_units
    else:
        programs = gl.num_programs(0)
        return (num_units + programs - 1) // programs * programs


@gluon.jit
def unit_at(place, num_units, DECODE: gl.constexpr):
    """The unit at a place, and whether there is one. Those of a span list, the longest first, are
    dealt out forwards and backwards in turn, so that all programs read about as many keys."""
    if DECODE:
        return place, True
    else:
        programs, program = gl.num_programs(0), gl.program_id(0)
        back = place + programs - 1 - 2 * program
        unit = gl.where((place // programs) % 2 == 0, place, back)
        return gl.minimum(unit, num_units - 1), unit < num_units


@gluon.jit
def num_slots_of(
    lists, span, first, last,
    DECODE: gl.constexpr, MASKED: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """First page of a span, its pages, and how many of its slots the rows up to ``last`` may
    see."""
    if DECODE:
        first_page, num_pages = gl.load(lists[2] + span * 8), gl.load(lists[2] + span * 8 + 1)
        return first_page, num_pages, num_pages * PAGE_SIZE
    else:
        first_page = gl.load(lists[2] + span)
        num_pages = gl.load(lists[2] + span + 1) - first_page
        latest = gl.load(lists[7] + last)
        length = gl.minimum(gl.load(lists[4] + span), latest - gl.load(lists[3] + span) + 1)
        if MASKED:
            # of a patch a row sees as many slots as stand at its position or before
            length += gl.load(lists[5] + span) * (gl.load(lists[9] + last) - length)
        return first_page, num_pages, gl.maximum(length, 0)


@gluon.jit
def rows_of(
    lists, first, local, num_packed, kv_head,
    DECODE: gl.constexpr, GROUP: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of ``COUNT`` packed rows: which there are, row (or entry), query row and head."""
    packed = local + gl.arange(0, COUNT, layout=LAYOUT)
    m_row = packed < num_packed
    place = first + packed // GROUP
    row = place
    if DECODE:
        row = gl.load(lists[3] + place * 4, mask=m_row, other=0)
    return m_row, place, row, kv_head * GROUP + packed % GROUP


@gluon.jit
def _rows_of_tile(
    page_indices, start, num_pages, kv_head,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Where the pages of a tile begin; past the run it is some page of it, and nobody looks.

    All are asked for before any is used: one after another their latencies would add up."""
    rows = ()
    for n in gl.static_range(RUN):
        page = gl.load(page_indices + gl.minimum(start // PAGE_SIZE + n, num_pages - 1))
        rows = rows + ((page * NUM_KV_HEADS + kv_head) * PAGE_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _fetch_pages(
    desc, tiles, barrier, rows, stage,
    PAGE_SIZE: gl.constexpr, HALVES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """The pages of one tile."""
    mbarrier.expect(barrier, RUN * PAGE_SIZE * HALVES * HALF * 2)
    for n in gl.static_range(RUN):
        for half in gl.static_range(HALVES):
            place = (stage * HALVES + half) * RUN + n
            load_tile(desc, [rows[n], half * HALF], barrier, tiles.index(place))


@gluon.jit
def _waited(waiting, needed, SIDE: gl.constexpr):
    """Wait for the kernels before this one where that is still to do and ``needed``; what is still
    to do then."""
    if (waiting & needed) != 0:
        gdc_wait()
        # started no sooner, the next kernel need not wait for what this one has waited for
        if SIDE == 0:
            gdc_launch_dependents()
    return waiting & (1 - needed)


@gluon.jit
def _ask_for_angles(
    lists, first_row, last, span, table, ANGLES: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Have the second cache hold the ``ANGLES`` cosines and sines by which each of ``COUNT`` rows
    turns to a span. Nobody waits for them here; who turns the rows would wait for the memory, since
    the keys of all layers go through that cache between one turn to a position and the next."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    cos, sin, stride_table = table
    offset = gl.load(lists[3] + span)
    for n in gl.static_range((COUNT + 31) // 32):
        row = gl.minimum(first_row + 32 * n + gl.arange(0, 32, layout=LAYOUT), last)
        position = gl.maximum(gl.load(lists[7] + row) - offset, 0)
        at = position.to(gl.int64) * stride_table * 4
        for half in gl.static_range(2):
            address = at + (sin if half else cos).to(gl.int64)
            gl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                [address, gl.full([32], 4 * ANGLES, gl.int32, layout=LAYOUT)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def fetch(
    data,
    SIDE: gl.constexpr, DECODE: gl.constexpr, MASKED: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, SHARED: gl.constexpr,
    WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr,
    IN_PARTS: gl.constexpr, ANGLES: gl.constexpr,
):  # fmt: skip
    """A fetching warp: every tile of the keys (``SIDE`` 0) or the values (1) of every span of every
    unit, in the order of the readers. Of tiles ``IN_PARTS`` a ring of keys is asked for before any
    values are, and the ``ANGLES`` by which rows turn to a span with its values."""
    desc, tiles, full, asked, page_indices, lists, table = data
    HALVES: gl.constexpr = HEAD_DIM // HALF
    RUN: gl.constexpr = KEYS // PAGE_SIZE
    pages = seen_as(tiles, STAGES * HALVES * RUN, PAGE_SIZE, SHARED)
    count = 0
    num_units = num_units_of(lists, DECODE, NUM_KV_HEADS)
    waiting = 1
    if AWAITED and SIDE == 0:
        gdc_launch_dependents()
    for place in range(gl.program_id(0), num_places_of(num_units, DECODE), gl.num_programs(0)):
        unit, there = unit_at(place, num_units, DECODE)
        kv_head, first, num_packed, begin, end, skip, before = unit_of(
            lists, unit, there, DECODE, NUM_KV_HEADS, GROUP
        )
        for block in range(0, num_packed, WORKERS * ROWS):
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            for span in range(begin, end):
                written = 1
                if DECODE:
                    # what nobody writes any more may come before the wait, as far as the ring goes
                    written = 1 - gl.load(lists[2] + span * 8 + 7)
                first_page, num_pages, num_slots = num_slots_of(
                    lists, span, first, last, DECODE, MASKED, PAGE_SIZE
                )
                start_slot = gl.where(span == begin, skip, 0)
                num_slots = gl.where(span == end - 1, gl.minimum(num_slots, before), num_slots)
                if SIDE == 1 and IN_PARTS and ANGLES and num_slots > start_slot:
                    _ask_for_angles(
                        lists, first + block // GROUP, last, span, table, ANGLES,
                        (WORKERS * ROWS + GROUP - 1) // GROUP + (WORKERS * ROWS % GROUP != 0),
                    )  # fmt: skip
                for start in range(start_slot, num_slots, KEYS):
                    stage = count % STAGES
                    rows = _rows_of_tile(
                        page_indices + first_page, start, num_pages, kv_head,
                        NUM_KV_HEADS, PAGE_SIZE, RUN,
                    )  # fmt: skip
                    if not AWAITED:
                        needed = written | (count == STAGES).to(gl.int32)
                        waiting = _waited(waiting, needed, SIDE)
                    if IN_PARTS and SIDE == 1 and count == 0:
                        # no value is needed before the scores of a tile of keys
                        mbarrier.wait(asked.index(0), 0)
                    if count >= STAGES:
                        await_back(stage, SIDE, STAGES, WORKERS)
                    _fetch_pages(
                        desc, pages, full.index(stage), rows, stage, PAGE_SIZE, HALVES, RUN
                    )
                    if IN_PARTS and SIDE == 0 and count == STAGES - 1:
                        mbarrier.arrive(asked.index(0), count=1)
                    count += 1
    if IN_PARTS and SIDE == 0 and count < STAGES:
        mbarrier.arrive(asked.index(0), count=1)
    if not AWAITED:
        _waited(waiting, 1, SIDE)
    if AWAITED:
        # who waits for this kernel must not find the one before it unfinished
        gdc_wait()
