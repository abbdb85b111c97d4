"""Page scores on the device: programs loop over blocks of candidates of a row and KV head.

The last program of a row and head stores the step's keys and values, if there are any. The query
heads of a KV head are the rows of one product with all vectors of a block, so that vectors are
loaded once. The query is rotated once per program if all pages are of one span, else once per span
of a block."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.page_scores.reference import LayerRules
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.ops.select_pages.candidate_list import CandidateList, PageScores
from looseleaf.ops.store_kv import NewRows
from looseleaf.ops.store_kv.kernel import store_heads

# bytes of a block of vectors: two blocks of two vectors take half of a program's registers
_BLOCK_BYTES = 8192
# of a wide block, of which shared memory holds a copy beside the rows
_MOST_BYTES = 65536
# four programs per SM with registers for exactly four: an SM with a fifth would finish last
_PROGRAMS, _REGISTERS = 528, 128


@triton.jit
def _best_products(b_q, m_row, b_first, b_second, TWO: tl.constexpr):
    """The largest product of rotated rows [M, D] with each page [P]."""
    if TWO:
        rising = tl.maximum(b_q, 0.0).to(b_first.dtype)
        falling = tl.minimum(b_q, 0.0).to(b_first.dtype)
        product = tl.dot(rising, tl.trans(b_first), input_precision="ieee")
        product = tl.dot(falling, tl.trans(b_second), product, input_precision="ieee")
    else:
        product = tl.dot(b_q.to(b_first.dtype), tl.trans(b_first), input_precision="ieee")
    return tl.max(tl.where(m_row[:, None], product, float("-inf")), 0)


@triton.jit
def _vectors_of(
    vectors, page, m_vector, kv_head, stride_page, stride_head, o_d,
    HEAD_DIM: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The summary vectors of pages [P] for a KV head: one [P, D], or two."""
    o_vector = page.to(tl.int64) * stride_page + kv_head * stride_head
    p_vector = vectors + o_vector[:, None] + o_d[None, :]
    b_first = tl.load(p_vector, mask=m_vector, other=0.0)
    b_second = b_first
    if TWO:
        b_second = tl.load(p_vector + HEAD_DIM, mask=m_vector, other=0.0)
    return b_first, b_second


@triton.jit
def _page_scores_kernel(
    q, vectors, cos, sin, scores, maxima, num_rows, candidate_row, num_pages, first_recent,
    pages, starts, spans, span_offset, row_positions,
    most, most_runs, most_spans, sink, window, softmax_scale,
    stride_q_row, stride_q_head, stride_q_d, stride_page, stride_head, stride_table,
    k, v, frame_positions, slots, k_pages, v_pages, num_new,
    stride_k_token, stride_k_head, stride_k_d, stride_v_token, stride_v_head, stride_v_d,
    stride_k_page, stride_k_page_head, stride_k_slot, stride_k_page_d,
    stride_v_page, stride_v_page_head, stride_v_slot, stride_v_page_d,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TWO: tl.constexpr, WINDOWED: tl.constexpr, CHAINED: tl.constexpr,
    MANY_SPANS: tl.constexpr, RUN: tl.constexpr, SATURATE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, kv_head, begin = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_P
    o_row, programs = row.to(tl.int64) * most, tl.num_programs(2)
    count = tl.where(row < tl.load(num_rows), tl.load(num_pages + row), 0)
    if k is not None:
        programs -= 1
        if tl.program_id(2) == programs:
            count = 0
            for token in range(row, num_new, tl.num_programs(0)):
                own_head = kv_head.to(tl.int64) + tl.arange(0, 1)
                store_heads(
                    k, v, frame_positions, slots, cos, sin, k_pages, v_pages,
                    tl.cast(token, tl.int64), own_head, own_head >= 0,
                    stride_k_token, stride_k_head, stride_k_d,
                    stride_v_token, stride_v_head, stride_v_d,
                    stride_k_page, stride_k_page_head, stride_k_slot, stride_k_page_d,
                    stride_v_page, stride_v_page_head, stride_v_slot, stride_v_page_d,
                    stride_table, PAGE_SIZE, HEAD_DIM, ROTARY_DIM, INTERLEAVED, CHAINED,
                    SATURATE, BLOCK_D, HAS_VALUES,
                )  # fmt: skip
    if begin < count:
        pair = row.to(tl.int64) * NUM_KV_HEADS + kv_head
        query_row = tl.load(candidate_row + row).to(tl.int64)
        position, recent = tl.load(row_positions + query_row), tl.load(first_recent + row)
        o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        m_row, m_d = o_m < GROUP, o_d < HEAD_DIM
        head = (kv_head * GROUP + o_m).to(tl.int64)
        p_q = q + query_row * stride_q_row + head * stride_q_head
        frame_position = tl.maximum(position - tl.load(span_offset + row * most_spans), 0)
        step, o_p = programs * BLOCK_P, tl.arange(0, BLOCK_P)
        # vectors do not depend on the previous kernel: the first block is loaded before its wait,
        # and each further block while the previous one is scored
        exists = begin + o_p < count
        page = tl.load(pages + o_row + begin + o_p, mask=exists, other=0)
        b_first, b_second = _vectors_of(
            vectors, page, exists[:, None] & m_d[None, :], kv_head, stride_page, stride_head, o_d,
            HEAD_DIM, TWO,
        )  # fmt: skip
        after = begin + step + o_p
        page = tl.load(pages + o_row + after, mask=after < count, other=0)
        await_previous(CHAINED)
        if not MANY_SPANS:
            b_q = load_rotated(
                p_q, stride_q_d, frame_position + tl.zeros_like(o_m), cos, sin, stride_table, m_row,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
            )  # fmt: skip  # [M, D]
        for first in range(begin, count, step):
            ordinal = first + o_p
            exists, after = ordinal < count, ordinal + step
            next_first, next_second = _vectors_of(
                vectors, page, (after < count)[:, None] & m_d[None, :], kv_head, stride_page,
                stride_head, o_d, HEAD_DIM, TWO,
            )  # fmt: skip
            page = tl.load(pages + o_row + after + step, mask=after + step < count, other=0)
            if MANY_SPANS:
                best = tl.full((BLOCK_P,), float("-inf"), tl.float32)
                span = tl.load(spans + o_row + ordinal, mask=exists, other=-1)
                for span_index in range(tl.load(spans + o_row + first), tl.max(span, 0) + 1):
                    frame_position = position - tl.load(span_offset + row * most_spans + span_index)
                    b_q = load_rotated(
                        p_q, stride_q_d, tl.maximum(frame_position, 0) + tl.zeros_like(o_m),
                        cos, sin, stride_table, m_row, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
                    )  # fmt: skip  # [M, D]
                    best = tl.where(
                        span == span_index, _best_products(b_q, m_row, b_first, b_second, TWO), best
                    )
            else:
                best = _best_products(b_q, m_row, b_first, b_second, TWO)
            best *= softmax_scale
            best = tl.where((ordinal < sink) | (ordinal >= recent), float("inf"), best)
            if WINDOWED:
                last = tl.load(starts + o_row + ordinal, mask=exists, other=0) + PAGE_SIZE - 1
                page_span = tl.load(spans + o_row + ordinal, mask=exists, other=0)
                offset = tl.load(span_offset + row * most_spans + page_span, mask=exists, other=0)
                best = tl.where(position - offset - last < window, best, float("-inf"))
            tl.store(scores + pair * most + ordinal, best, mask=exists)
            if RUN > 1:
                best = tl.where(exists, best, float("-inf"))
                largest = tl.max(tl.reshape(best, (BLOCK_P // RUN, RUN)), 1)
                o_run = first // RUN + tl.arange(0, BLOCK_P // RUN)
                tl.store(maxima + pair * most_runs + o_run, largest, mask=o_run < most_runs)
            b_first, b_second = next_first, next_second
        # an earlier start of the next kernel would take SMs from this one
        start_next(CHAINED)
    else:
        await_previous(CHAINED)


def page_scores_triton(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    rules: LayerRules,
    run: int,
    new: NewRows | None = None,
) -> PageScores:
    """See `looseleaf.ops.page_scores`."""
    rotation, rule, page_size = rules
    rows, most = candidates.pages.shape
    heads, head_dim = vectors.shape[1], q.shape[2]
    group, most_spans = q.shape[1] // heads, candidates.span_offset.shape[1]
    assert vectors.stride(2) == 1, "the numbers of a vector must be contiguous"
    block_d = max(16, triton.next_power_of_2(head_dim))
    # at least the longest run, and no more pages than keep all programs busy
    block_bytes = block_d * vectors.itemsize
    block_p = max(32, min(64, _BLOCK_BYTES // block_bytes))
    if block_bytes * block_p > _MOST_BYTES:
        # the products of fp32 latents read both factors from shared memory
        block_p = 16
        run = min(run, block_p)
    scores = torch.empty((rows, heads, most), dtype=torch.float32, device=q.device)
    maxima = scores
    if run > 1:
        maxima = scores.new_empty(rows, heads, triton.cdiv(most, run))
    # wider vectors need the registers of twice as many threads
    fits = block_p * block_bytes <= _BLOCK_BYTES
    chained, blocks = chains(q), triton.cdiv(most, block_p)
    programs = max(1, min(blocks, _PROGRAMS // (rows * heads)))
    new_arguments: tuple[object, ...] = (None,) * 6 + (0,) * 15
    if new is not None:
        tensors = new.k, new.v, new.k_pages, new.v_pages
        lists = new.frame_positions.contiguous(), new.slots.contiguous()
        strides = (stride for tensor in tensors for stride in tensor.stride())
        new_arguments = (new.k, new.v, *lists, *tensors[2:], len(new.k), *strides)
    _page_scores_kernel[(rows, heads, programs + (new is not None))](
        q, vectors, *table(rotation), scores, maxima, candidates.num_rows, candidates.row,
        candidates.num_pages, candidates.first_recent, candidates.pages, candidates.starts,
        candidates.spans, candidates.span_offset, row_positions,
        most, maxima.shape[2], most_spans, candidates.sink, rule.window, rule.softmax_scale,
        *q.stride(), *vectors.stride()[:2], rotation.cos.stride(0), *new_arguments,
        NUM_KV_HEADS=heads, GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved,
        TWO=vectors.shape[2] == 2 * head_dim, WINDOWED=rule.window != 0, CHAINED=chained,
        MANY_SPANS=most_spans > 1, RUN=run,
        SATURATE=new is not None and new.k_pages.dtype is FP8,
        HAS_VALUES=new is not None and not same_memory(new.k_pages, new.v_pages),
        BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_P=block_p,
        BLOCK_D=block_d, num_warps=4 if fits else 8, maxnreg=_REGISTERS if fits else None,
        num_stages=1, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return PageScores(scores, maxima, run)
