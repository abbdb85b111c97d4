"""The router on the device: a program computes scores, choices and weights of a block of rows."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ExpertConfig
from looseleaf.ops.scores.kernel import await_previous, chains, start_next

# scores of a program
_SCORES = 4096


@triton.jit
def _sum_parts(logits, o_r, o_e, m, stride_part, stride_row, PARTS: tl.constexpr):
    total = tl.zeros((o_r.shape[0], o_e.shape[0]), tl.float32)
    p_logits = logits + o_r.to(tl.int64)[:, None] * stride_row + o_e[None, :]
    for part in tl.static_range(PARTS):
        total += tl.load(p_logits + part * stride_part, mask=m, other=0.0).to(tl.float32)
    return total


@triton.jit
def _in_best_groups(
    ranked, o_e, GROUPS: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """``ranked`` [R, E], and -inf outside of each row's ``TOP`` best groups of ``SIZE`` experts."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    o_g = tl.arange(0, BLOCK_G)
    group_scores = tl.full((ranked.shape[0], BLOCK_G), float("-inf"), tl.float32)
    for group in range(GROUPS):
        members = tl.where((o_e // SIZE == group)[None, :], ranked, float("-inf"))
        score, place = tl.max(members, 1, return_indices=True)
        if LARGEST == 2:
            rest = tl.where(o_e[None, :] == place[:, None], float("-inf"), members)
            score += tl.max(rest, 1)
        group_scores = tl.where((o_g == group)[None, :], score[:, None], group_scores)
    inside = tl.zeros(ranked.shape, tl.int1)
    for _ in range(TOP):
        best = tl.argmax(group_scores, 1)
        inside = inside | (o_e[None, :] // SIZE == best[:, None])
        group_scores = tl.where(o_g[None, :] == best[:, None], float("-inf"), group_scores)
    return tl.where(inside, ranked, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits, selection_bias, experts, weights, rows, stride_part, stride_row, scaling,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZED: tl.constexpr, SHARED_GATE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, LARGEST: tl.constexpr,
    CHAINED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    SLOTS: tl.constexpr = TOP_K + SHARED
    o_r, o_e = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    m_r, m_e = o_r < rows, o_e < EXPERTS
    if selection_bias is not None:
        b_bias = tl.load(selection_bias + o_e, mask=m_e, other=0.0)
    await_previous(CHAINED)
    m = m_r[:, None] & m_e[None, :]
    b_logits = _sum_parts(logits, o_r, o_e, m, stride_part, stride_row, PARTS)
    # a row of NaN chooses experts that exist; its result is NaN by its values
    b_logits = tl.where(b_logits == b_logits, b_logits, 0.0)
    if SOFTMAX:
        b_logits = tl.where(m_e[None, :], b_logits, float("-inf"))
        power = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
        scores = power / tl.sum(power, 1)[:, None]
    else:
        scores = tl.sigmoid(b_logits)
    ranked = scores
    if selection_bias is not None:
        ranked += b_bias[None, :]
    # infinite logits give NaN
    ranked = tl.where(m_e[None, :] & (ranked == ranked), ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _in_best_groups(ranked, o_e, GROUPS, TOP_GROUPS, EXPERTS // GROUPS, LARGEST)
    o_k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_R, BLOCK_K), tl.int32)
    shares = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for slot in range(TOP_K):
        best = tl.argmax(ranked, 1)
        is_best = o_e[None, :] == best[:, None]
        share = tl.sum(tl.where(is_best, scores, 0.0), 1)
        chosen = tl.where((o_k == slot)[None, :], best[:, None], chosen)
        shares = tl.where((o_k == slot)[None, :], share[:, None], shares)
        ranked = tl.where(is_best, float("-inf"), ranked)
    if NORMALIZED:
        shares /= tl.sum(shares, 1)[:, None] + 1e-20
    shares *= scaling
    if SHARED:
        is_shared = (o_k >= TOP_K)[None, :]
        gate = tl.full((BLOCK_R,), 1.0, tl.float32)
        if SHARED_GATE:
            column = EXPERTS + tl.arange(0, 1)
            total = _sum_parts(logits, o_r, column, m_r[:, None], stride_part, stride_row, PARTS)
            gate = tl.sigmoid(tl.sum(total, 1))
        chosen = tl.where(is_shared, (EXPERTS - TOP_K + o_k)[None, :], chosen)
        shares = tl.where(is_shared, gate[:, None], shares)
    p = o_r.to(tl.int64)[:, None] * SLOTS + o_k[None, :]
    m_out = m_r[:, None] & (o_k < SLOTS)[None, :]
    tl.store(experts + p, chosen, mask=m_out)
    tl.store(weights + p, shares, mask=m_out)


def route_triton(
    logits: Float[Tensor, "*parts rows logits"],
    law: ExpertConfig,
    selection_bias: Float[Tensor, " experts"] | None = None,
) -> tuple[Int[Tensor, "rows slots"], Float[Tensor, "rows slots"]]:
    """See `looseleaf.ops.experts.route`."""
    rows, device = logits.shape[-2], logits.device
    parts, stride_part = (1, 0) if logits.ndim == 2 else (len(logits), logits.stride(0))
    assert logits.stride(-1) == 1, "a row must be contiguous"
    experts = torch.empty((rows, law.num_slots), dtype=torch.int32, device=device)
    weights = torch.empty((rows, law.num_slots), dtype=torch.float32, device=device)
    if not rows:
        return experts, weights
    chained = chains(logits)
    block_e = triton.next_power_of_2(law.num_experts)
    # few rows run side by side
    block_r = min(max(1, _SCORES // block_e), 1 if rows <= 64 else 16)
    _route_kernel[(triton.cdiv(rows, block_r),)](
        logits, selection_bias, experts, weights, rows, stride_part, logits.stride(-2),
        law.scaling, PARTS=parts, EXPERTS=law.num_experts, TOP_K=law.top_k, SHARED=law.num_shared,
        SOFTMAX=law.scoring == "softmax", NORMALIZED=law.normalized, SHARED_GATE=law.shared_gate,
        GROUPS=law.num_groups, TOP_GROUPS=law.top_groups, LARGEST=law.group_scores,
        CHAINED=chained, BLOCK_R=block_r, BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(law.num_slots),
        num_warps=1 if block_r == 1 else 4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return experts, weights
