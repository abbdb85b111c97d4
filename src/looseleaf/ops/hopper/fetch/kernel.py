"""The units of the Hopper kernel's persistent programs, and its producer warps.

A unit is a KV head of a work-list item, or of a unit of a span list, which may have a part of the
keys. Lists are tuples of arrays in the order of `looseleaf.ops.hopper.attention`: five for a work
list, eight for a span list, ten for a span list with patches."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.hopper.barriers.kernel import await_release
from looseleaf.ops.hopper.tiles.kernel import HALF, ROWS

# Triton 3.6 uses other names than later versions
OLD_NAMES = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_tile = tma.async_copy_global_to_shared if OLD_NAMES.value else tma.async_load


@gluon.jit
def reinterpret_tiles(tiles, COUNT: gl.constexpr, LENGTH: gl.constexpr, SHARED: gl.constexpr):
    """The same shared memory as ``COUNT`` tiles of ``LENGTH`` rows."""
    if OLD_NAMES:
        return tiles._reinterpret(tiles.dtype, [COUNT, LENGTH, HALF], SHARED)
    else:
        return tiles.reinterpret(tiles.dtype, [COUNT, LENGTH, HALF], SHARED)


@gluon.jit
def unit_of(
    lists, unit, exists, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """KV head, first row (or entry), packed rows, first and end span of a unit, and two slots.

    The unit reads its first span from slot ``start_slot`` on and its last span before ``end_slot``.
    A unit without ``exists`` has no rows."""
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
        start_slot, end_slot = gl.load(p_unit + 4), gl.load(p_unit + 5)
        num_packed = gl.where(exists, num_packed, 0)
        return unit % NUM_KV_HEADS, first, num_packed, begin, end, start_slot, end_slot


@gluon.jit
def num_units_of(lists, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr):
    """Number of units of all programs."""
    if DECODE:
        return (gl.load(lists[1]) - gl.load(lists[0])) * NUM_KV_HEADS
    else:
        return gl.load(lists[0]) * NUM_KV_HEADS


@gluon.jit
def num_indices_of(num_units, DECODE: gl.constexpr):
    """Number of unit indices: a span list is padded to a multiple of the programs."""
    if DECODE:
        return num_units
    else:
        programs = gl.num_programs(0)
        return (num_units + programs - 1) // programs * programs


@gluon.jit
def unit_at(index, num_units, DECODE: gl.constexpr):
    """The unit at an index, and whether it exists.

    Units of a span list come longest first. They are dealt alternately forwards and backwards, so
    that programs get similar numbers of keys."""
    if DECODE:
        return index, True
    else:
        programs, program = gl.num_programs(0), gl.program_id(0)
        back = index + programs - 1 - 2 * program
        unit = gl.where((index // programs) % 2 == 0, index, back)
        return gl.minimum(unit, num_units - 1), unit < num_units


@gluon.jit
def num_slots_of(
    lists, span, first, last,
    DECODE: gl.constexpr, MASKED: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """First page of a span, its pages, and its slots that the rows up to ``last`` may see."""
    if DECODE:
        first_page, num_pages = gl.load(lists[2] + span * 8), gl.load(lists[2] + span * 8 + 1)
        return first_page, num_pages, num_pages * PAGE_SIZE
    else:
        first_page = gl.load(lists[2] + span)
        num_pages = gl.load(lists[2] + span + 1) - first_page
        latest = gl.load(lists[7] + last)
        length = gl.minimum(gl.load(lists[4] + span), latest - gl.load(lists[3] + span) + 1)
        if MASKED:
            # in a patch, a row sees the slots at its position or before
            length += gl.load(lists[5] + span) * (gl.load(lists[9] + last) - length)
        return first_page, num_pages, gl.maximum(length, 0)


@gluon.jit
def rows_of(
    lists, first, local, num_packed, kv_head,
    DECODE: gl.constexpr, GROUP: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Mask, row (or entry), query row and head of ``COUNT`` packed rows."""
    packed = local + gl.arange(0, COUNT, layout=LAYOUT)
    m_row = packed < num_packed
    entry = first + packed // GROUP
    row = entry
    if DECODE:
        row = gl.load(lists[3] + entry * 4, mask=m_row, other=0)
    return m_row, entry, row, kv_head * GROUP + packed % GROUP


@gluon.jit
def _rows_of_tile(
    page_indices, start, num_pages, kv_head,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """First row of each page of a tile; past the run a repeated page, which bounds hide.

    All loads are issued before the first use, so that latencies overlap."""
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
    """Starts the copies of one tile's pages."""
    mbarrier.expect(barrier, RUN * PAGE_SIZE * HALVES * HALF * 2)
    for n in gl.static_range(RUN):
        for half in gl.static_range(HALVES):
            index = (stage * HALVES + half) * RUN + n
            load_tile(desc, [rows[n], half * HALF], barrier, tiles.index(index))


@gluon.jit
def _await_kernels(pending, needed, SIDE: gl.constexpr):
    """Waits for the previous kernels if that is ``pending`` and ``needed``; returns the new
    ``pending``."""
    if (pending & needed) != 0:
        gdc_wait()
        # after this wait, the next kernel need not wait for the kernels before this one
        if SIDE == 0:
            gdc_launch_dependents()
    return pending & (1 - needed)


@gluon.jit
def _prefetch_angles(
    lists, first_row, last, span, table, ANGLES: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Prefetches to L2 the ``ANGLES`` cosines and sines with which ``COUNT`` rows rotate to a span.

    The keys of all layers pass through L2 between two uses of a position's angles. Without the
    prefetch, the consumer warpgroups would wait for memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    cos, sin, stride_table = table
    offset = gl.load(lists[3] + span)
    for n in gl.static_range((COUNT + 31) // 32):
        row = gl.minimum(first_row + 32 * n + gl.arange(0, 32, layout=LAYOUT), last)
        position = gl.maximum(gl.load(lists[7] + row) - offset, 0)
        byte_offset = position.to(gl.int64) * stride_table * 4
        for half in gl.static_range(2):
            address = byte_offset + (sin if half else cos).to(gl.int64)
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
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr,
    IN_PARTS: gl.constexpr, ANGLES: gl.constexpr,
):  # fmt: skip
    """A producer warp: copies every tile of keys (``SIDE`` 0) or values (1) in the consumers'
    order.

    For tiles ``IN_PARTS``, the copies of a ring of keys start before those of values, and the
    ``ANGLES`` of a span are prefetched with its values."""
    desc, tiles, full, k_issued, page_indices, lists, table = data
    HALVES: gl.constexpr = HEAD_DIM // HALF
    RUN: gl.constexpr = KEYS // PAGE_SIZE
    pages = reinterpret_tiles(tiles, STAGES * HALVES * RUN, PAGE_SIZE, SHARED)
    count = 0
    num_units = num_units_of(lists, DECODE, NUM_KV_HEADS)
    pending = 1
    if AWAITED and SIDE == 0:
        gdc_launch_dependents()
    for index in range(gl.program_id(0), num_indices_of(num_units, DECODE), gl.num_programs(0)):
        unit, exists = unit_at(index, num_units, DECODE)
        kv_head, first, num_packed, begin, end, first_slot, end_slot = unit_of(
            lists, unit, exists, DECODE, NUM_KV_HEADS, GROUP
        )
        for block in range(0, num_packed, CONSUMERS * ROWS):
            last = first + (gl.minimum(block + CONSUMERS * ROWS, num_packed) - 1) // GROUP
            for span in range(begin, end):
                is_written = 1
                if DECODE:
                    # final pages may be copied before the wait, up to a full ring
                    is_written = 1 - gl.load(lists[2] + span * 8 + 7)
                first_page, num_pages, num_slots = num_slots_of(
                    lists, span, first, last, DECODE, MASKED, PAGE_SIZE
                )
                start_slot = gl.where(span == begin, first_slot, 0)
                num_slots = gl.where(span == end - 1, gl.minimum(num_slots, end_slot), num_slots)
                if SIDE == 1 and IN_PARTS and ANGLES and num_slots > start_slot:
                    _prefetch_angles(
                        lists, first + block // GROUP, last, span, table, ANGLES,
                        (CONSUMERS * ROWS + GROUP - 1) // GROUP + (CONSUMERS * ROWS % GROUP != 0),
                    )  # fmt: skip
                for start in range(start_slot, num_slots, KEYS):
                    stage = count % STAGES
                    rows = _rows_of_tile(
                        page_indices + first_page, start, num_pages, kv_head,
                        NUM_KV_HEADS, PAGE_SIZE, RUN,
                    )  # fmt: skip
                    if not AWAITED:
                        needed = is_written | (count == STAGES).to(gl.int32)
                        pending = _await_kernels(pending, needed, SIDE)
                    if IN_PARTS and SIDE == 1 and count == 0:
                        # values are needed only after the scores of a tile of keys
                        mbarrier.wait(k_issued.index(0), 0)
                    if count >= STAGES:
                        await_release(stage, SIDE, STAGES, CONSUMERS)
                    _fetch_pages(
                        desc, pages, full.index(stage), rows, stage, PAGE_SIZE, HALVES, RUN
                    )
                    if IN_PARTS and SIDE == 0 and count == STAGES - 1:
                        mbarrier.arrive(k_issued.index(0), count=1)
                    count += 1
    if IN_PARTS and SIDE == 0 and count < STAGES:
        mbarrier.arrive(k_issued.index(0), count=1)
    if not AWAITED:
        _await_kernels(pending, 1, SIDE)
    if AWAITED:
        # the next kernel relies on the completion of all kernels before this one
        gdc_wait()
