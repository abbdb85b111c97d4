"""The log-sum-exp merge: one program a row and head, a tile of states at a time."""

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.types import AttnState


@triton.jit
def _merge_states_kernel(
    states_out,
    states_lse,
    carried_out,
    carried_lse,
    out,
    lse,
    row_state_indptr,
    stride_state,
    stride_state_head,
    stride_lse_state,
    stride_lse_head,
    stride_carried_row,
    stride_carried_head,
    stride_carried_lse_row,
    stride_carried_lse_head,
    stride_out_row,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    start_next(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(row_state_indptr + row), tl.load(row_state_indptr + row + 1)
    o_l, o_s, o_d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM

    await_previous(CHAINED)
    # the row starts from its carried state, or from the empty one
    acc = tl.zeros((BLOCK_D,), tl.float32)
    first_peak = tl.full((), float("-inf"), tl.float32)
    if carried_out is not None:
        p_carried = carried_lse + row * stride_carried_lse_row + head * stride_carried_lse_head
        first_peak = tl.load(p_carried)
    # the weights need the largest lse only: the outputs can then be read in any order
    peak = first_peak
    p_lse = states_lse + head * stride_lse_head
    for first in range(start, stop, BLOCK_L):
        state = first + o_l
        b_lse = tl.load(
            p_lse + state.to(tl.int64) * stride_lse_state, mask=state < stop, other=float("-inf")
        )
        peak = tl.maximum(peak, tl.max(b_lse, 0))
    pivot = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.exp(first_peak - pivot)
    if carried_out is not None:
        p_carried = carried_out + row * stride_carried_row + head * stride_carried_head
        m_carried = m_d & (acc + first_peak > float("-inf"))
        acc = total * tl.load(p_carried + o_d, mask=m_carried, other=0.0).to(tl.float32)

    for first in range(start, stop, BLOCK_S):
        state = (first + o_s).to(tl.int64)
        b_lse = tl.load(p_lse + state * stride_lse_state, mask=state < stop, other=float("-inf"))
        # an empty state's output may be anything, so it is not read
        m_out = (b_lse > float("-inf"))[:, None] & m_d[None, :]
        p_out = states_out + state * stride_state + head * stride_state_head
        b_out = tl.load(p_out[:, None] + o_d[None, :], mask=m_out, other=0.0).to(tl.float32)
        weight = tl.exp(b_lse - pivot)
        acc += tl.sum(weight[:, None] * b_out, 0)
        total += tl.sum(weight, 0)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(out + row * stride_out_row + head * stride_out_head + o_d, acc / total, mask=m_d)
    merged = tl.where(empty, float("-inf"), peak + tl.log(total))
    tl.store(lse + row * tl.num_programs(1) + head, merged)


def merge_states_triton(
    states: AttnState,
    row_state_indptr: Int[Tensor, " rows_plus_one"],
    carried: AttnState | None = None,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.merge_states`."""
    heads, head_dim = states.out.shape[1:]
    rows = row_state_indptr.shape[0] - 1
    if out is None:
        out = states.out.new_empty((rows, heads, head_dim))
    lse = states.lse.new_empty((rows, heads))
    if not out.numel():
        return AttnState(out, lse)
    assert states.out.stride(2) == out.stride(2) == 1, "a head's output must be contiguous"
    carried_out, carried_lse = carried if carried is not None else (None, None)
    if carried_out is not None and carried_lse is not None:
        assert carried_out.stride(2) == 1, "a head's output must be contiguous"
        carried_strides = (*carried_out.stride()[:2], *carried_lse.stride())
    else:
        carried_strides = (0, 0, 0, 0)
    chained = chains(out)
    _merge_states_kernel[(rows, heads)](
        states.out, states.lse, carried_out, carried_lse, out, lse, row_state_indptr.contiguous(),
        *states.out.stride()[:2], *states.lse.stride(), *carried_strides, *out.stride()[:2],
        HEAD_DIM=head_dim, CHAINED=chained,
        BLOCK_L=32, BLOCK_S=8, BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
        enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return AttnState(out, lse)
