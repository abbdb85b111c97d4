"""The merge with ``(0, sink)`` on the device: one program per row and block of heads."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.types import AttnState

# elements of a program's block
_BLOCK = 1024


@triton.jit
def _add_sinks_kernel(
    out, lse, sinks, heads,
    stride_out_row, stride_out_head, stride_lse_row,
    HEAD_DIM: tl.constexpr, CHAINED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_head = head < heads
    sink = tl.load(sinks + head, mask=m_head, other=0.0)
    await_previous(CHAINED)
    p_lse = lse + row * stride_lse_row + head
    b_lse = tl.load(p_lse, mask=m_head, other=float("-inf"))
    # the output of an empty state is undefined
    m_out = (b_lse != float("-inf"))[:, None] & (o_d < HEAD_DIM)[None, :]
    p_out = out + row * stride_out_row + (head * stride_out_head)[:, None] + o_d[None, :]
    b_out = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    # exponents are never positive, so nothing overflows
    peak = tl.maximum(b_lse, sink, propagate_nan=tl.PropagateNan.ALL)
    own, rest = tl.exp(b_lse - peak), tl.exp(sink - peak)
    total = own + rest
    m_row = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
    tl.store(p_out, b_out * (own / total)[:, None], mask=m_row)
    tl.store(p_lse, peak + tl.log(total), mask=m_head)


def add_sinks_triton(state: AttnState, sinks: Float[Tensor, " qo_heads"]) -> AttnState:
    """See `looseleaf.ops.add_sinks`."""
    out, lse = state
    rows, heads, head_dim = out.shape
    if not out.numel():
        return state
    assert out.stride(2) == lse.stride(1) == sinks.stride(0) == 1, "heads must be contiguous"
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, _BLOCK // block_d))
    chained = chains(out)
    _add_sinks_kernel[(rows, triton.cdiv(heads, block_h))](
        out, lse, sinks, heads, *out.stride()[:2], lse.stride(0),
        HEAD_DIM=head_dim, CHAINED=chained, BLOCK_H=block_h, BLOCK_D=block_d,
        num_warps=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return state
