"""Page scores on the device: a program a row, KV head and block of candidates.

The heads of a group are the rows of one product with the vectors of all pages of the block, which
are read once. A block may hold pages of several spans; its query is turned once for each."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.ops.select_pages.candidate_list import CandidateList
from looseleaf.types import Rotation, ScoreRule

# pages of one program
_BLOCK_P = 64


@triton.jit
def _page_scores_kernel(
    q, vectors, cos, sin, scores, num_rows, candidate_row, num_pages, first_recent,
    pages, starts, spans, span_offset, row_positions,
    most, most_spans, sink, window, softmax_scale,
    stride_q_row, stride_q_head, stride_q_d, stride_page, stride_head, stride_table,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TWO: tl.constexpr, WINDOWED: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    row, kv_head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_P
    count = 0
    if row < tl.load(num_rows):
        count = tl.load(num_pages + row)
    if first < count:
        ordinal = first + tl.arange(0, BLOCK_P)
        exists = ordinal < count
        o_row = row.to(tl.int64) * most + ordinal
        page = tl.load(pages + o_row, mask=exists, other=0).to(tl.int64)
        span = tl.load(spans + o_row, mask=exists, other=-1)
        query_row = tl.load(candidate_row + row).to(tl.int64)
        position = tl.load(row_positions + query_row)
        o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        m_row, m_d = o_m < GROUP, o_d < HEAD_DIM
        o_vector = page * stride_page + kv_head * stride_head
        m_vector = exists[:, None] & m_d[None, :]
        p_vector = vectors + o_vector[:, None] + o_d[None, :]
        b_first = tl.load(p_vector, mask=m_vector, other=0.0)  # [P, D]
        if TWO:
            b_second = tl.load(p_vector + HEAD_DIM, mask=m_vector, other=0.0)
        # what is kept of sealed pages was there before the step: only the query is new
        await_previous(CHAINED)
        head = (kv_head * GROUP + o_m).to(tl.int64)
        best = tl.full((BLOCK_P,), float("-inf"), tl.float32)
        last_span = tl.max(span, 0)
        for one in range(tl.load(spans + row.to(tl.int64) * most + first), last_span + 1):
            at = position - tl.load(span_offset + row * most_spans + one)
            b_q = load_rotated(
                q + query_row * stride_q_row + head * stride_q_head, stride_q_d,
                tl.maximum(at, 0) + tl.zeros_like(o_m), cos, sin, stride_table, m_row,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
            )  # fmt: skip  # [M, D]
            if TWO:
                rising = tl.maximum(b_q, 0.0).to(b_first.dtype)
                falling = tl.minimum(b_q, 0.0).to(b_first.dtype)
                wanted = tl.dot(rising, tl.trans(b_first), input_precision="ieee")
                wanted += tl.dot(falling, tl.trans(b_second), input_precision="ieee")
            else:
                b_q = b_q.to(b_first.dtype)
                wanted = tl.dot(b_q, tl.trans(b_first), input_precision="ieee")
            wanted = tl.where(m_row[:, None], wanted, float("-inf"))
            best = tl.where(span == one, tl.max(wanted, 0) * softmax_scale, best)
        forced = (ordinal < sink) | (ordinal >= tl.load(first_recent + row))
        best = tl.where(forced, float("inf"), best)
        if WINDOWED:
            last = tl.load(starts + o_row, mask=exists, other=0) + PAGE_SIZE - 1
            offset = tl.load(span_offset + row * most_spans + span, mask=exists, other=0)
            best = tl.where(position - offset - last < window, best, float("-inf"))
        p_score = scores + (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * most + ordinal
        tl.store(p_score, best, mask=exists)
    else:
        await_previous(CHAINED)


def page_scores_triton(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    how: tuple[Rotation, ScoreRule, int],
) -> Float[Tensor, "rows kv_heads most"]:
    """See `looseleaf.ops.page_scores`."""
    rotation, rule, page_size = how
    rows, most = candidates.pages.shape
    heads, head_dim = vectors.shape[1], q.shape[2]
    group = q.shape[1] // heads
    assert vectors.stride(2) == 1, "the numbers of a vector must be contiguous"
    scores = torch.empty((rows, heads, most), dtype=torch.float32, device=q.device)
    block_p, chained = _BLOCK_P, chains(q)
    _page_scores_kernel[(rows, heads, triton.cdiv(most, block_p))](
        q, vectors, *table(rotation), scores, candidates.num_rows, candidates.row,
        candidates.num_pages, candidates.first_recent, candidates.pages, candidates.starts,
        candidates.spans, candidates.span_offset, row_positions,
        most, candidates.span_offset.shape[1], candidates.sink, rule.window, rule.softmax_scale,
        *q.stride(), *vectors.stride()[:2], rotation.cos.stride(0),
        NUM_KV_HEADS=heads, GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved,
        TWO=vectors.shape[2] == 2 * head_dim, WINDOWED=rule.window != 0, CHAINED=chained,
        BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_P=block_p,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4, num_stages=2, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return scores
