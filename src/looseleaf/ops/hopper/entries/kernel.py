"""Rotation of 64 packed rows of a work-list item in the Hopper kernel, as (row, head) pairs.

Cosines and sines are loaded once per row. The host writes the entries, so they are loaded while the
previous kernel runs; only the queries are awaited."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from looseleaf.ops.hopper.tiles.kernel import HALF, ROWS, store_halves


@gluon.jit
def angles_of(
    lists, first, local, num_packed, scale, table, GROUP: gl.constexpr, ROTATED: gl.constexpr
):  # fmt: skip
    """Cosines and sines of 64 packed rows' frame positions, times ``scale``: [rows, half of the
    dims].

    A row before the frame sees no key in it, and gets the angle of position 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, GROUP, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    ANGLES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    cos, sin, stride_table = table
    o_row = gl.arange(0, ROWS // GROUP, layout=gl.SliceLayout(1, ANGLES))
    o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, ANGLES))
    m_row = local + o_row * GROUP < num_packed
    entry = lists[3] + (first + local // GROUP + o_row) * 4
    b_cos = gl.full([ROWS // GROUP, HALF], scale, gl.float32, layout=ANGLES)
    b_sin = gl.zeros([ROWS // GROUP, HALF], gl.float32, layout=ANGLES)
    if ROTATED:
        position = gl.maximum(gl.load(entry + 1, mask=m_row, other=0), 0).to(gl.int64)
        p_angle = (position * stride_table)[:, None] + o_d[None, :]
        p_cos = gl.multiple_of(cos + p_angle, [1, 16])
        p_sin = gl.multiple_of(sin + p_angle, [1, 16])
        b_cos = gl.load(p_cos, mask=m_row[:, None], other=1.0) * scale
        b_sin = gl.load(p_sin, mask=m_row[:, None], other=0.0) * scale
    return b_cos, b_sin


@gluon.jit
def queries_of(lists, first, local, num_packed, kv_head, queries, GROUP: gl.constexpr):
    """Addresses of the lower halves of 64 packed rows, and their mask."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, GROUP, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    q, stride_row, stride_head, _ = queries
    o_row = gl.arange(0, ROWS // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    o_h = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    m_row = local + o_row * GROUP < num_packed
    row = gl.load(lists[3] + (first + local // GROUP + o_row) * 4, mask=m_row, other=0)
    p_row = (q + row.to(gl.int64) * stride_row)[:, None]
    p_head = p_row + ((kv_head * GROUP + o_h) * stride_head)[None, :]
    p_x = p_head[:, :, None] + gl.expand_dims(o_d[None, :], 1)
    return p_x, (m_row[:, None] & (o_h >= 0)[None, :])[:, :, None]


@gluon.jit
def rotate_entries(q_tile, addresses, angles):
    """Rotates the rows at ``addresses`` into a tile of shared memory."""
    p_x, m_x = addresses
    b_cos, b_sin = angles
    p_high = gl.multiple_of(p_x + HALF, [1, 1, 16])
    b_low = gl.load(gl.multiple_of(p_x, [1, 1, 16]), mask=m_x, other=0.0).to(gl.float32)
    b_high = gl.load(p_high, mask=m_x, other=0.0).to(gl.float32)
    b_cos, b_sin = gl.expand_dims(b_cos, 1), gl.expand_dims(b_sin, 1)
    low, high = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
    store_halves(q_tile, low.reshape([ROWS, HALF]), high.reshape([ROWS, HALF]))
