"""The work of a consumer warpgroup on the tiles of a span, 64 rows at a time.

A running state is that of `looseleaf.ops.scores.kernel`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from looseleaf.ops.hopper.barriers.kernel import (
    acquire_tensor_cores,
    release_tile,
    yield_tensor_cores,
)

ROWS = gl.constexpr(64)
# tiles are stored as halves of 64 dims, the width of the hardware's swizzle
HALF = gl.constexpr(64)
PACKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
wait_for_group = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _rotate_half(
    q_half, vector, position, m_row, scale, table,
    HALF_INDEX: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Half of the dims of rows, rotated to ``position`` and scaled, into shared memory."""
    cos, sin, stride_table = table
    ROTATED: gl.constexpr = ROTARY_DIM // 2
    o_d = HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    if INTERLEAVED:
        is_first = o_d % 2 == 0
        partner = o_d ^ 1
        angle = o_d // 2
    else:
        is_first = o_d < ROTATED
        partner = gl.where(is_first, o_d + ROTATED, o_d - ROTATED)
        angle = gl.where(is_first, o_d, o_d - ROTATED)
    m_x = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    m_rotated = m_row[:, None] & (o_d < ROTARY_DIM)[None, :]
    p_angle = position.to(gl.int64)[:, None] * stride_table + angle[None, :]
    b_x = gl.load(vector[:, None] + o_d[None, :], mask=m_x, other=0.0)
    b_partner = gl.load(vector[:, None] + partner[None, :], mask=m_rotated, other=0.0)
    b_cos = gl.load(cos + p_angle, mask=m_rotated, other=1.0)
    b_sin = gl.load(sin + p_angle, mask=m_rotated, other=0.0)
    b_sin = gl.where(is_first[None, :], -b_sin, b_sin)
    rotated = b_x.to(gl.float32) * b_cos + b_partner.to(gl.float32) * b_sin
    q_half.store((rotated * scale).to(q_half.dtype))


@gluon.jit
def store_halves(q_tile, low, high):
    """Stores both halves of 64 rows, [ROWS, HALF] each, to shared memory in one store.

    With two stores the compiler inserts a barrier of the warpgroup between them."""
    both = gl.join(low.to(q_tile.dtype), high.to(q_tile.dtype)).permute((0, 2, 1))
    q_tile.store(both.reshape([ROWS, 2 * HALF]))


@gluon.jit
def rotate_rows(
    q_tile, vector, position, m_row, scale, table,
    HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr, INTERLEAVED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows, rotated to ``position`` and scaled, into a tile of shared memory."""
    HALVES: gl.constexpr = HEAD_DIM // HALF
    if HALVES == 2 and ROTARY_DIM == HEAD_DIM and not INTERLEAVED:
        # each half has the partners of the other: one aligned load of each
        cos, sin, stride_table = table
        o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        # alignment hints: a partition of warp_specialize does not inherit those of the arguments
        p_x = vector[:, None] + o_d[None, :]
        p_angle = position.to(gl.int64)[:, None] * stride_table + o_d[None, :]
        m_x = m_row[:, None]
        b_low = gl.load(gl.multiple_of(p_x, [1, 16]), mask=m_x, other=0.0)
        b_high = gl.load(gl.multiple_of(p_x + HALF, [1, 16]), mask=m_x, other=0.0)
        b_cos = gl.load(gl.multiple_of(cos + p_angle, [1, 16]), mask=m_x, other=1.0) * scale
        b_sin = gl.load(gl.multiple_of(sin + p_angle, [1, 16]), mask=m_x, other=0.0) * scale
        b_low, b_high = b_low.to(gl.float32), b_high.to(gl.float32)
        low, high = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
        store_halves(q_tile, low, high)
    else:
        for half in gl.static_range(HALVES):
            _rotate_half(
                q_tile.slice(half * HALF, HALF, 1), vector, position, m_row, scale, table, half,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, LAYOUT,
            )  # fmt: skip


@gluon.jit
def _rotate_heads(
    q_tile, unit, position, queries, table, ROTATED: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """64 packed rows as (row, head) pairs: angles are loaded once per row, and all loads precede
    all uses."""
    first, local, num_packed, kv_head = unit
    q, stride_row, stride_head, scale = queries
    cos, sin, stride_table = table
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, GROUP, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))
    o_row = gl.arange(0, ROWS // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    o_h = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    m_row = local + o_row * GROUP < num_packed
    p_row = (q + (first + local // GROUP + o_row).to(gl.int64) * stride_row)[:, None]
    p_head = p_row + ((kv_head * GROUP + o_h) * stride_head)[None, :]
    p_x = p_head[:, :, None] + gl.expand_dims(o_d[None, :], 1)
    m_x = (m_row[:, None] & (o_h >= 0)[None, :])[:, :, None]
    b_low = gl.load(gl.multiple_of(p_x, [1, 1, 16]), mask=m_x, other=0.0)
    b_high = gl.load(gl.multiple_of(p_x + HALF, [1, 1, 16]), mask=m_x, other=0.0)
    if ROTATED:
        row_position, m_angle = (
            gl.convert_layout(position, ROW),
            gl.convert_layout(m_row, ROW)[:, None],
        )
        p_angle = row_position.to(gl.int64)[:, None] * stride_table + o_d[None, :]
        p_cos = gl.multiple_of(cos + p_angle, [1, 16])
        p_sin = gl.multiple_of(sin + p_angle, [1, 16])
        b_cos = gl.expand_dims(gl.load(p_cos, mask=m_angle, other=1.0) * scale, 1)
        b_sin = gl.expand_dims(gl.load(p_sin, mask=m_angle, other=0.0) * scale, 1)
        b_low, b_high = b_low.to(gl.float32), b_high.to(gl.float32)
        low, high = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
    else:
        low, high = b_low.to(gl.float32) * scale, b_high.to(gl.float32) * scale
    store_halves(q_tile, low.reshape([ROWS, HALF]), high.reshape([ROWS, HALF]))


@gluon.jit
def positions_of_unit(lists, unit, GROUP: gl.constexpr, BY_HEADS: gl.constexpr):
    """True positions of a span-list unit's rows, in the layout of `rotate_unit`."""
    first, local, num_packed, _ = unit
    if BY_HEADS:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, GROUP, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
        o_row = gl.arange(0, ROWS // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        row, m_row = first + local // GROUP + o_row, local + o_row * GROUP < num_packed
    else:
        packed = local + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PACKED))
        row, m_row = first + packed // GROUP, packed < num_packed
    return gl.load(lists[7] + row, mask=m_row, other=0)


@gluon.jit
def rotate_unit(
    q_tile, unit, position, queries, table,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, BY_HEADS: gl.constexpr,
):  # fmt: skip
    """Rotates 64 packed rows to ``position`` (at least 0), scaled, into a tile of shared memory."""
    position = gl.maximum(position, 0)
    if BY_HEADS:
        _rotate_heads(q_tile, unit, position, queries, table, ROTARY_DIM > 0, GROUP)
    else:
        first, local, num_packed, kv_head = unit
        q, stride_row, stride_head, scale = queries
        packed = local + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PACKED))
        vector = q + (first + packed // GROUP).to(gl.int64) * stride_row
        vector += (kv_head * GROUP + packed % GROUP) * stride_head
        rotate_rows(
            q_tile, vector, position, packed < num_packed, scale, table,
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, PACKED,
        )  # fmt: skip


@gluon.jit
def _key_positions(
    lists, first_page, num_slots, start,
    DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Frame positions of a tile's keys; past the run a position above every bound."""
    slot = start + gl.arange(0, KEYS, layout=LAYOUT)
    position = slot
    if DECODE:
        p_position = lists[4] + first_page + slot // PAGE_SIZE
        position = gl.load(p_position, mask=slot < num_slots, other=0) + slot % PAGE_SIZE
    return gl.where(slot < num_slots, position, 2147483647)


@gluon.jit
def plain_end_of_run(
    first_position, last_position, num_pages, least_bound, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """Number of leading slots that all rows with bounds of at least ``least_bound`` see."""
    num_slots = num_pages * PAGE_SIZE
    # page positions rise, but selected pages have gaps
    is_run = last_position - first_position == num_slots - PAGE_SIZE
    before_last = gl.where(last_position <= least_bound, num_slots - PAGE_SIZE, 0)
    seen = gl.where(is_run, least_bound - first_position, before_last)
    seen = gl.where(last_position + PAGE_SIZE <= least_bound, num_slots, seen)
    return gl.minimum(seen, num_slots)


@gluon.jit
def _start_scores(q_tile, k_tile, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Starts the product of a tile's scores, asynchronously."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout=S_LAYOUT)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _row_peaks(scores, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """The largest score of each row, by several independent chains of maxima; `gl.max` makes one
    chain."""
    runs = gl.max(scores.reshape([ROWS, KEYS // 32, 4, 8]), 2)
    return gl.convert_layout(gl.max(gl.max(runs, 1), 1), gl.SliceLayout(1, S_LAYOUT))


@gluon.jit
def _words(lists, keys, start, MASKED: gl.constexpr, KEYS: gl.constexpr):
    """The bitmap words of a tile's keys, loaded well before their use."""
    words = ()
    if MASKED:
        num_slots, first_word = keys[2], keys[6]
        for n in gl.static_range(KEYS // 32):
            exists = (first_word >= 0) & (start + 32 * n < num_slots)
            word = gl.load(lists[8] + first_word + start // 32 + n, mask=exists, other=0)
            words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def _mask_hidden(scores, words, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores with -inf for keys that the bitmap of all rows hides."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    word = gl.where(key < 32, words[0], words[1])
    for n in gl.static_range(2, KEYS // 32):
        word = gl.where(key // 32 == n, words[n], word)
    return gl.where(((word >> (key % 32)) & 1)[None, :] != 0, float("-inf"), scores)


@gluon.jit
def _softmax_tile(
    scores, peak, total, lists, keys, start, words,
    DECODE: gl.constexpr, MASKED: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of a tile, the new peak and total, and the factor by which earlier values shrink."""
    first_page, _, num_slots, plain_end, bound, _, _ = keys
    if MASKED:
        hidden = words[0]
        for n in gl.static_range(1, KEYS // 32):
            hidden |= words[n]
        if hidden != 0:
            scores = _mask_hidden(scores, words, KEYS, S_LAYOUT)
    if start + KEYS > plain_end:
        position = _key_positions(
            lists, first_page, num_slots, start, DECODE, PAGE_SIZE, KEYS,
            gl.SliceLayout(0, S_LAYOUT),
        )  # fmt: skip
        scores = gl.where(position[None, :] < bound[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, _row_peaks(scores, KEYS, S_LAYOUT))
    # a row without keys so far: a finite pivot keeps its weights 0, not NaN
    pivot = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = gl.exp2(scores - pivot[:, None])
    shrink = gl.exp2(peak - pivot)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _round_in_place(weight, dtype: gl.constexpr):
    """``weight`` in 16 bits, at this point of the program: the compiler would sink it below the
    next wait."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weight],
            dtype=gl.bfloat16, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [weight],
            dtype=gl.float16, is_pure=False, pack=2,
        )  # fmt: skip


@gluon.jit
def _keep_alive(x):
    """Keeps the registers of ``x``, 16 bits each, unchanged until here, since a product reads them.

    As a dependency of the wait, the compiler would unpack and repack them."""
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _multiply_in_place(x, y):
    """``x * y`` at this point: the compiler would hoist it before the asynchronous product."""
    return gl.inline_asm_elementwise(
        "mul.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _clear_tile(
    v_tile, lists, keys, start,
    DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Zeroes the values of a tile that no row sees, if there are any.

    Their pages may hold NaN, which a weight of 0 does not clear."""
    KEY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first_page, _, num_slots, plain_end, _, last_bound, _ = keys
    if start + KEYS > plain_end:
        position = _key_positions(
            lists, first_page, num_slots, start, DECODE, PAGE_SIZE, KEYS,
            gl.SliceLayout(1, KEY_LAYOUT),
        )  # fmt: skip
        b_v = v_tile.load(KEY_LAYOUT)
        v_tile.store(gl.where((position < last_bound)[:, None], b_v, gl.zeros_like(b_v)))
        fence_async_shared()
        wait_for_group()


@gluon.jit
def fold_span(
    q_tile, tiles, barriers, state, count, lists, keys, next_rotation,
    CONSUMER: gl.constexpr, DECODE: gl.constexpr, MASKED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, BY_HEADS: gl.constexpr, CONSUMERS: gl.constexpr,
    ROTATE_NEXT: gl.constexpr,
):  # fmt: skip
    """The running state of 64 rows after the keys of one span, and the count of tiles so far.

    The product of weights and values overlaps the next tile's exponentials; the earlier values
    shrink during the next tile's scores. With ``ROTATE_NEXT``, the rows rotate to the next span
    beside the last product, when their tile is free. Two warpgroups of a span list read the same
    tiles and alternate on the tensor cores."""
    k_tiles, v_tiles = tiles
    ORDERED: gl.constexpr = CONSUMERS == 2 and not DECODE
    k_full, v_full = barriers
    acc, peak, total = state
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage, phase = count % STAGES, (count // STAGES) & 1
    first, num_slots = keys[1], keys[2]
    words = _words(lists, keys, first, MASKED, KEYS)
    mbarrier.wait(k_full.index(stage), phase)
    b_q = q_tile
    if not DECODE:
        # queries in registers for all tiles: shared memory then serves keys only
        b_q = q_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    if ORDERED:
        acquire_tensor_cores(CONSUMER)
    scores = _start_scores(b_q, k_tiles.index(stage), KEYS, S_LAYOUT)
    if ORDERED:
        yield_tensor_cores(CONSUMER)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release_tile(stage, 0, STAGES, CONSUMERS)
    weight, peak, total, shrink = _softmax_tile(
        scores, peak, total, lists, keys, first, words, DECODE, MASKED, PAGE_SIZE, KEYS, S_LAYOUT
    )
    b_p = gl.convert_layout(weight.to(v_tiles.dtype), P_LAYOUT)
    for start in range(first + KEYS, num_slots, KEYS):
        stage, phase = count % STAGES, (count // STAGES) & 1
        next_stage, next_phase = (count + 1) % STAGES, ((count + 1) // STAGES) & 1
        words = _words(lists, keys, start, MASKED, KEYS)
        mbarrier.wait(k_full.index(next_stage), next_phase)
        if ORDERED:
            acquire_tensor_cores(CONSUMER)
        scores = _start_scores(b_q, k_tiles.index(next_stage), KEYS, S_LAYOUT)
        acc = _multiply_in_place(acc, gl.convert_layout(shrink, O_ROW)[:, None])
        mbarrier.wait(v_full.index(stage), phase)
        # only the last tile of a span has hidden keys; it is handled after the loop
        acc = warpgroup_mma(b_p, v_tiles.index(stage), acc, is_async=True)
        if ORDERED:
            yield_tensor_cores(CONSUMER)
        scores = warpgroup_mma_wait(1, deps=[scores])
        release_tile(next_stage, 0, STAGES, CONSUMERS)
        weight, peak, total, shrink = _softmax_tile(
            scores, peak, total, lists, keys, start, words,
            DECODE, MASKED, PAGE_SIZE, KEYS, S_LAYOUT,
        )  # fmt: skip
        next_p = gl.convert_layout(_round_in_place(weight, v_tiles.dtype), P_LAYOUT)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _keep_alive(b_p)
        release_tile(stage, 1, STAGES, CONSUMERS)
        b_p = next_p
        count += 1
    stage, phase = count % STAGES, (count // STAGES) & 1
    mbarrier.wait(v_full.index(stage), phase)
    last_tile = (num_slots - 1) // KEYS * KEYS
    _clear_tile(v_tiles.index(stage), lists, keys, last_tile, DECODE, PAGE_SIZE, KEYS)
    acc *= gl.convert_layout(shrink, O_ROW)[:, None]
    acc = warpgroup_mma(b_p, v_tiles.index(stage), acc, is_async=True)
    if ROTATE_NEXT:
        has_next, unit, position, queries, table = next_rotation
        if has_next:
            rotate_unit(
                q_tile, unit, position, queries, table,
                GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS,
            )  # fmt: skip
    acc, b_p = warpgroup_mma_wait(0, deps=[acc, b_p])
    release_tile(stage, 1, STAGES, CONSUMERS)
    return (acc, peak, total), count + 1
