"""Page bounds on the device: one program per page and KV head."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def _page_bounds_kernel(
    k_pages, num_keys, bounds, num_pages,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # index over (layer, page, KV head)
    index = tl.program_id(0).to(tl.int64)
    count = tl.load(num_keys + index // NUM_KV_HEADS % num_pages)
    slot, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    m_key = (slot < count)[:, None] & m_d[None, :]
    p_key = k_pages + index * PAGE_SIZE * HEAD_DIM + slot[:, None] * HEAD_DIM + o_d[None, :]
    keys = tl.load(p_key, mask=m_key, other=0.0).to(tl.float32)
    p_bound = bounds + index * 2 * HEAD_DIM + o_d
    tl.store(p_bound, tl.max(tl.where(m_key, keys, float("-inf")), 0), mask=m_d)
    tl.store(p_bound + HEAD_DIM, tl.min(tl.where(m_key, keys, float("inf")), 0), mask=m_d)


def page_bounds_triton(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
) -> Float[Tensor, "layers pages kv_heads two_head_dims"]:
    """See `looseleaf.ops.page_bounds`."""
    layers, pages, heads, page_size, head_dim = k_pages.shape
    size = (layers, pages, heads, 2 * head_dim)
    bounds = torch.empty(size, dtype=k_pages.dtype, device=k_pages.device)
    if bounds.numel():
        _page_bounds_kernel[(layers * pages * heads,)](
            k_pages.contiguous(), num_keys.contiguous(), bounds, pages,
            NUM_KV_HEADS=heads, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
            BLOCK_S=triton.next_power_of_2(page_size), BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return bounds
