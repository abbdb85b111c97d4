"""Device functions of the Hopper kernel: what a computing group does with the tiles that were
fetched for it, 64 rows at a time.

A running state is that of `looseleaf.ops.scores.kernel`, its values in halves of 64 dims."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)
# tiles are kept in halves of 64 dims, the width that the hardware swizzles
HALF = gl.constexpr(64)
wait_for_group = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _turn_half(
    q_tile, vector, stride_d, position, m_row, scale, table,
    HALF_INDEX: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Half of the dims of some rows, turned to ``position``, scaled, to shared memory."""
    cos, sin, stride_table = table
    TURNED: gl.constexpr = ROTARY_DIM // 2
    o_d = HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    if INTERLEAVED:
        is_first = o_d % 2 == 0
        partner = o_d ^ 1
        angle = o_d // 2
    else:
        is_first = o_d < TURNED
        partner = gl.where(is_first, o_d + TURNED, o_d - TURNED)
        angle = gl.where(is_first, o_d, o_d - TURNED)
    m_x = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    m_turn = m_row[:, None] & (o_d < ROTARY_DIM)[None, :]
    p_angle = position.to(gl.int64)[:, None] * stride_table + angle[None, :]
    b_x = gl.load(vector[:, None] + (o_d * stride_d)[None, :], mask=m_x, other=0.0)
    b_partner = gl.load(vector[:, None] + (partner * stride_d)[None, :], mask=m_turn, other=0.0)
    b_cos = gl.load(cos + p_angle, mask=m_turn, other=1.0)
    b_sin = gl.load(sin + p_angle, mask=m_turn, other=0.0)
    b_sin = gl.where(is_first[None, :], -b_sin, b_sin)
    turned = b_x.to(gl.float32) * b_cos + b_partner.to(gl.float32) * b_sin
    q_tile.store((turned * scale).to(q_tile.dtype))


@gluon.jit
def turn_rows(
    q_tiles, place, next_half, vector, stride_d, position, m_row, scale, table,
    HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr, INTERLEAVED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Some rows, turned to ``position`` and scaled, to the tile of shared memory at ``place``, the
    other half of their dims ``next_half`` tiles further on."""
    HALVES: gl.constexpr = HEAD_DIM // HALF
    if HALVES == 2 and ROTARY_DIM == HEAD_DIM and not INTERLEAVED:
        # each half holds the partners of the other: everything is read once, and in one piece
        cos, sin, stride_table = table
        o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        p_x = vector[:, None] + (o_d * stride_d)[None, :]
        p_angle = position.to(gl.int64)[:, None] * stride_table + o_d[None, :]
        b_low = gl.load(p_x, mask=m_row[:, None], other=0.0).to(gl.float32)
        b_high = gl.load(p_x + HALF * stride_d, mask=m_row[:, None], other=0.0).to(gl.float32)
        b_cos = gl.load(cos + p_angle, mask=m_row[:, None], other=1.0) * scale
        b_sin = gl.load(sin + p_angle, mask=m_row[:, None], other=0.0) * scale
        low, high = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
        q_tiles.index(place).store(low.to(q_tiles.dtype))
        q_tiles.index(place + next_half).store(high.to(q_tiles.dtype))
    else:
        for half in gl.static_range(HALVES):
            _turn_half(
                q_tiles.index(place + half * next_half), vector, stride_d, position, m_row, scale,
                table, half, HEAD_DIM, ROTARY_DIM, INTERLEAVED, LAYOUT,
            )  # fmt: skip


@gluon.jit
def _clear_unseen(v_tile, seen, KEY_LAYOUT: gl.constexpr):
    """Zero the values that no row sees: their pages may hold anything, and 0 times NaN is NaN."""
    b_v = v_tile.load(KEY_LAYOUT)
    v_tile.store(gl.where(seen[:, None], b_v, gl.zeros_like(b_v)))


@gluon.jit
def _key_positions(
    lists, first_page, num_slots, start,
    DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Frame positions of a tile's keys; past the run one that no bound reaches."""
    slot = start + gl.arange(0, KEYS, layout=LAYOUT)
    position = slot
    if DECODE:
        p_position = lists[7] + first_page + slot // PAGE_SIZE
        position = gl.load(p_position, mask=slot < num_slots, other=0) + slot % PAGE_SIZE
    return gl.where(slot < num_slots, position, 2147483647)


@gluon.jit
def plain_end_of_run(
    first_position, last_position, num_pages, least_bound, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """How many leading slots of pages at such positions all rows see whose bounds are
    ``least_bound`` or more."""
    num_slots = num_pages * PAGE_SIZE
    # pages rise by position, but those of a selection are no run
    is_run = last_position - first_position == num_slots - PAGE_SIZE
    before_last = gl.where(last_position <= least_bound, num_slots - PAGE_SIZE, 0)
    seen = gl.where(is_run, least_bound - first_position, before_last)
    seen = gl.where(last_position + PAGE_SIZE <= least_bound, num_slots, seen)
    return gl.minimum(seen, num_slots)


@gluon.jit
def _score(
    q_tiles, q_place, k_tiles, stage,
    HALVES: gl.constexpr, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys, begun and not waited for."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=S_LAYOUT)
    scores = warpgroup_mma(
        q_tiles.index(q_place), k_tiles.index(stage * HALVES).permute((1, 0)),
        scores, use_acc=False, is_async=True,
    )  # fmt: skip
    if HALVES == 2:
        scores = warpgroup_mma(
            q_tiles.index(q_place + 1), k_tiles.index(stage * HALVES + 1).permute((1, 0)),
            scores, is_async=True,
        )  # fmt: skip
    return scores


@gluon.jit
def _weigh(
    scores, peak, total, lists, keys, start,
    DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of a tile, the new peak and total, and by what the values so far shrink."""
    first_page, num_slots, plain_end, bound, _ = keys
    if start + KEYS > plain_end:
        position = _key_positions(
            lists, first_page, num_slots, start, DECODE, PAGE_SIZE, KEYS,
            gl.SliceLayout(0, S_LAYOUT),
        )  # fmt: skip
        scores = gl.where(position[None, :] < bound[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    # a row may have seen no key yet: a finite pivot keeps its weights 0, not NaN
    pivot = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = gl.exp2(scores - pivot[:, None])
    shrink = gl.exp2(peak - pivot)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _computed_here(x):
    """``x``, all of it computed before any wait that follows.

    The assembler would rather wait first, and the product that the exponentials should run beside
    would be over. Numbers that are not negative never sleep.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _clear_tile(
    v_tiles, stage, lists, keys, start,
    DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Clear what no row sees of a tile of values, if there may be such."""
    KEY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first_page, num_slots, plain_end, _, last_bound = keys
    if start + KEYS > plain_end:
        position = _key_positions(
            lists, first_page, num_slots, start, DECODE, PAGE_SIZE, KEYS,
            gl.SliceLayout(1, KEY_LAYOUT),
        )  # fmt: skip
        for half in gl.static_range(HALVES):
            _clear_unseen(v_tiles.index(stage * HALVES + half), position < last_bound, KEY_LAYOUT)
        fence_async_shared()
        wait_for_group()


@gluon.jit
def fold_span(
    q_tiles, q_place, k_tiles, v_tiles, barriers, low, high, peak, total, count, lists, keys,
    DECODE: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The running state with the keys of one span in it, for the rows at ``q_place``.

    The product of a tile's weights and values runs beside the next tile's scores and exponentials.
    """
    k_full, k_empty, v_full, v_empty = barriers
    HALVES: gl.constexpr = HEAD_DIM // HALF
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage, phase = count % STAGES, (count // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    scores = _score(q_tiles, q_place, k_tiles, stage, HALVES, KEYS, S_LAYOUT)
    scores = warpgroup_mma_wait(0, deps=[scores])
    wait_for_group()
    mbarrier.arrive(k_empty.index(stage), count=1)
    weight, peak, total, shrink = _weigh(
        scores, peak, total, lists, keys, 0, DECODE, PAGE_SIZE, KEYS, S_LAYOUT
    )
    b_p = gl.convert_layout(weight.to(v_tiles.dtype), P_LAYOUT)
    share = gl.convert_layout(shrink, O_ROW)[:, None]
    low *= share
    if HALVES == 2:
        high *= share
    num_slots = keys[1]
    for start in range(KEYS, num_slots, KEYS):
        stage, phase = count % STAGES, (count // STAGES) & 1
        next_stage, next_phase = (count + 1) % STAGES, ((count + 1) // STAGES) & 1
        mbarrier.wait(k_full.index(next_stage), next_phase)
        scores = _score(q_tiles, q_place, k_tiles, next_stage, HALVES, KEYS, S_LAYOUT)
        mbarrier.wait(v_full.index(stage), phase)
        # in a span only the last tiles hold what is not seen, and they come below
        low = warpgroup_mma(b_p, v_tiles.index(stage * HALVES), low, is_async=True)
        if HALVES == 2:
            high = warpgroup_mma(b_p, v_tiles.index(stage * HALVES + 1), high, is_async=True)
        scores = warpgroup_mma_wait(HALVES, deps=[scores])
        wait_for_group()
        mbarrier.arrive(k_empty.index(next_stage), count=1)
        weight, peak, total, shrink = _weigh(
            scores, peak, total, lists, keys, start, DECODE, PAGE_SIZE, KEYS, S_LAYOUT
        )
        next_p = gl.convert_layout(weight.to(v_tiles.dtype), P_LAYOUT)
        total = _computed_here(total)
        if HALVES == 2:
            low, high, b_p, next_p = warpgroup_mma_wait(0, deps=[low, high, b_p, next_p])
        else:
            low, b_p, next_p = warpgroup_mma_wait(0, deps=[low, b_p, next_p])
        wait_for_group()
        mbarrier.arrive(v_empty.index(stage), count=1)
        b_p = next_p
        share = gl.convert_layout(shrink, O_ROW)[:, None]
        low *= share
        if HALVES == 2:
            high *= share
        count += 1
    stage, phase = count % STAGES, (count // STAGES) & 1
    mbarrier.wait(v_full.index(stage), phase)
    last_tile = (num_slots - 1) // KEYS * KEYS
    _clear_tile(v_tiles, stage, lists, keys, last_tile, DECODE, PAGE_SIZE, KEYS, HALVES)
    low = warpgroup_mma(b_p, v_tiles.index(stage * HALVES), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(b_p, v_tiles.index(stage * HALVES + 1), high, is_async=True)
        low, high, b_p = warpgroup_mma_wait(0, deps=[low, high, b_p])
    else:
        low, b_p = warpgroup_mma_wait(0, deps=[low, b_p])
    wait_for_group()
    mbarrier.arrive(v_empty.index(stage), count=1)
    return low, high, peak, total, count + 1
