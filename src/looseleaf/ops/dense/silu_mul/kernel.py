"""SiLU times up on the device: one program per block of a row."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next

_BLOCK = 2048


@triton.jit
def _silu_mul_kernel(
    gate_up, out, features, stride_row, CHAINED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < features
    p_gate = gate_up + row * stride_row + o_x
    await_previous(CHAINED)
    b_gate = tl.load(p_gate, mask=m_x, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + features, mask=m_x, other=0.0).to(tl.float32)
    # exp of a number <= 0 cannot overflow
    decay = tl.exp(-tl.abs(b_gate))
    share = tl.where(b_gate < 0, decay, 1.0) / (1.0 + decay)
    tl.store(out + row * features + o_x, b_gate * share * b_up, mask=m_x)


def silu_mul_triton(
    gate_up: Float[Tensor, "rows twice_features"],
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.silu_mul`."""
    rows, twice = gate_up.shape
    features = twice // 2
    out = torch.empty((rows, features), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    assert gate_up.stride(1) == 1, "a row must be contiguous"
    chained = chains(gate_up)
    block = min(_BLOCK, triton.next_power_of_2(features))
    _silu_mul_kernel[(rows, triton.cdiv(features, block))](
        gate_up, out, features, gate_up.stride(0), CHAINED=chained, BLOCK=block,
        num_warps=max(1, block // 256), enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return out
