"""Sum and RMS norm on the device: one program per row, which reads and writes the row once."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next


@triton.jit
def _rms_norm_kernel(
    stream, delta, weight, out, features, eps, stride_stream, stride_delta, stride_part,
    PARTS: tl.constexpr, CHAINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < features
    b_weight = tl.load(weight + o_x, mask=m_x, other=0.0).to(tl.float32)
    await_previous(CHAINED)
    b_x = tl.load(stream + row * stride_stream + o_x, mask=m_x, other=0.0)
    if delta is not None:
        b_sum = b_x.to(tl.float32)
        for part in tl.static_range(PARTS):
            p_delta = delta + part * stride_part + row * stride_delta
            b_sum += tl.load(p_delta + o_x, mask=m_x, other=0.0).to(tl.float32)
        # rounded to the stream's dtype: the norm reads the stored value
        b_x = b_sum.to(stream.dtype.element_ty)
        tl.store(stream + row * stride_stream + o_x, b_x, mask=m_x)
    b_x = b_x.to(tl.float32)
    mean = tl.sum(b_x * b_x, 0) / features
    tl.store(out + row * features + o_x, b_x * tl.rsqrt(mean + eps) * b_weight, mask=m_x)


def rms_norm_triton(
    stream: Float[Tensor, "rows features"],
    weight: Float[Tensor, " features"],
    eps: float,
    delta: Float[Tensor, "*parts rows features"] | None = None,
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.rms_norm`."""
    rows, features = stream.shape
    out = torch.empty((rows, features), dtype=stream.dtype, device=stream.device)
    if not out.numel():
        return out
    assert stream.stride(1) == weight.stride(0) == 1, "a row must be contiguous"
    assert delta is None or delta.stride(-1) == 1, "a row must be contiguous"
    parts, stride_delta, stride_part = 0, 0, 0
    if delta is not None:
        parts, stride_delta = 1, delta.stride(-2)
        if delta.ndim == 3:
            parts, stride_part = delta.shape[0], delta.stride(0)
    block = triton.next_power_of_2(features)
    chained = chains(stream)
    _rms_norm_kernel[(rows,)](
        stream, delta, weight, out, features, eps, stream.stride(0),
        stride_delta, stride_part, PARTS=parts, CHAINED=chained, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return out
