"""The log-sum-exp merge on the device: one program per row and head, a tile of states at a time.

With many rows, a program takes several heads: most rows have one state, and the start of a program
costs more than the copy of a state."""

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.merge_states.kept import KeptStates
from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.types import AttnState

# outputs (rows x heads) from which a program takes several heads, one after another
_MANY, _HEADS = 4096, 4
# heads and states that a program reads together if `few_states` is set
_FEW_HEADS, _FEW_STATES = 2, 8


@triton.jit
def _merged(
    states_out, p_lse, start, stop, acc, first_peak,
    stride_state, stride_lse_state, head_offset, m_d,
    BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``(out, lse)`` of the states ``start`` to ``stop`` and of ``acc``, whose lse is
    ``first_peak``."""
    o_l, o_s, o_d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    # the first pass finds the largest lse, so that the second needs no rescaling
    peak = first_peak
    for first in range(start, stop, BLOCK_L):
        state = first + o_l
        b_lse = tl.load(
            p_lse + state.to(tl.int64) * stride_lse_state, mask=state < stop, other=float("-inf")
        )
        peak = tl.maximum(peak, tl.max(b_lse, 0))
    pivot = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.exp(first_peak - pivot)
    acc = acc * total
    for first in range(start, stop, BLOCK_S):
        state = (first + o_s).to(tl.int64)
        b_lse = tl.load(p_lse + state * stride_lse_state, mask=state < stop, other=float("-inf"))
        # the output of an empty state is undefined
        m_out = (b_lse > float("-inf"))[:, None] & m_d[None, :]
        p_out = states_out + state * stride_state + head_offset
        b_out = tl.load(p_out[:, None] + o_d[None, :], mask=m_out, other=0.0).to(tl.float32)
        weight = tl.exp(b_lse - pivot)
        acc += tl.sum(weight[:, None] * b_out, 0)
        total += tl.sum(weight, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return acc / total, tl.where(empty, float("-inf"), peak + tl.log(total))


@triton.jit
def _copied(
    states_out, states_lse, out, lse, row, heads, first_head, state,
    stride_state, stride_state_head, stride_lse_state, stride_lse_head,
    stride_out_row, stride_out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies the only state of a row, in the dtype of ``out``."""
    head, o_d = first_head + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    state = state.to(tl.int64)
    b_lse = tl.load(states_lse + state * stride_lse_state + head * stride_lse_head)
    m_d = (o_d < HEAD_DIM)[None, :]
    p_out = states_out + state * stride_state + (head * stride_state_head)[:, None] + o_d[None, :]
    # the output of an empty state is undefined
    b_out = tl.load(p_out, mask=(b_lse > float("-inf"))[:, None] & m_d, other=0.0)
    p_out = out + row * stride_out_row + (head * stride_out_head)[:, None] + o_d[None, :]
    tl.store(p_out, b_out, mask=(head >= 0)[:, None] & m_d)
    tl.store(lse + row * heads + head, b_lse)


@triton.jit
def _merged_few(
    states_out, states_lse, out, lse, row, heads, first_head, start, stop,
    stride_state, stride_state_head, stride_lse_state, stride_lse_head,
    stride_out_row, stride_out_head,
    HEADS: tl.constexpr, FEW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges up to ``FEW`` states for several heads.

    All loads are issued before the first use, so that their latencies overlap."""
    head, o_d = first_head + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    state = (start + tl.arange(0, FEW)).to(tl.int64)
    m_state = (head >= 0)[:, None] & (state < stop)[None, :]
    p_lse = states_lse + (head * stride_lse_head)[:, None] + (state * stride_lse_state)[None, :]
    p_out = (head * stride_state_head)[:, None] + (state * stride_state)[None, :]
    m_out = m_state[:, :, None] & (o_d < HEAD_DIM)[None, None, :]
    b_lse = tl.load(p_lse, mask=m_state, other=float("-inf"))
    b_out = tl.load(states_out + p_out[:, :, None] + o_d[None, None, :], mask=m_out, other=0.0)
    # the output of an empty state is undefined
    is_filled = b_lse > float("-inf")
    b_out = tl.where(is_filled[:, :, None], b_out.to(tl.float32), 0.0)
    peak = tl.max(b_lse, 1)
    pivot = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(b_lse - pivot[:, None])
    total = tl.sum(weight, 1)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    merged = tl.sum(weight[:, :, None] * b_out, 1) / total[:, None]
    p_out = out + row * stride_out_row + (head * stride_out_head)[:, None] + o_d[None, :]
    tl.store(p_out, merged, mask=(head >= 0)[:, None] & (o_d < HEAD_DIM)[None, :])
    tl.store(lse + row * heads + head, tl.where(empty, float("-inf"), peak + tl.log(total)))


@triton.jit
def _merge_states_kernel(
    states_out, states_lse, carried_out, carried_lse, kept_at, kept_first, kept_fresh,
    out, lse, row_state_indptr, heads,
    stride_state, stride_state_head, stride_lse_state, stride_lse_head,
    stride_carried_row, stride_carried_head, stride_carried_lse_row, stride_carried_lse_head,
    stride_out_row, stride_out_head,
    HEAD_DIM: tl.constexpr, CHAINED: tl.constexpr, INDPTR_READY: tl.constexpr,
    HEADS: tl.constexpr, FEW: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    # the previous kernel may write row_state_indptr
    await_previous(CHAINED and not INDPTR_READY)
    row, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    start, stop = tl.load(row_state_indptr + row), tl.load(row_state_indptr + row + 1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    slot, continues = row, True
    if kept_at is not None:
        slot = tl.load(kept_at + row).to(tl.int64)
        continues = (slot >= 0) & (tl.load(kept_fresh + row) == 0)

    await_previous(CHAINED)
    if FEW > 0 and stop - start <= FEW:
        _merged_few(
            states_out, states_lse, out, lse, row, heads, first_head, start, stop,
            stride_state, stride_state_head, stride_lse_state, stride_lse_head,
            stride_out_row, stride_out_head, HEADS, FEW, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    elif HEADS > 1 and carried_out is None and stop == start + 1:
        _copied(
            states_out, states_lse, out, lse, row, heads, first_head, start,
            stride_state, stride_state_head, stride_lse_state, stride_lse_head,
            stride_out_row, stride_out_head, HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    else:
        for n in tl.static_range(HEADS):
            head = first_head + n
            # the row starts from its carried state, or from the empty state
            acc = tl.zeros((BLOCK_D,), tl.float32)
            first_peak = tl.full((), float("-inf"), tl.float32)
            if carried_out is not None:
                p_lse = carried_lse + slot * stride_carried_lse_row + head * stride_carried_lse_head
                p_out = carried_out + slot * stride_carried_row + head * stride_carried_head
                first_peak = tl.load(p_lse, mask=continues, other=float("-inf"))
                m_carried = m_d & (acc + first_peak > float("-inf"))
                acc = tl.load(p_out + o_d, mask=m_carried, other=0.0).to(tl.float32)
            p_states, head_offset = states_lse + head * stride_lse_head, head * stride_state_head
            last = stop
            if kept_at is not None:
                first = tl.load(kept_first + row)
                if slot >= 0:
                    acc, first_peak = _merged(
                        states_out, p_states, first, stop, acc, first_peak,
                        stride_state, stride_lse_state, head_offset, m_d,
                        BLOCK_L, BLOCK_S, BLOCK_D,
                    )  # fmt: skip
                    tl.store(p_out + o_d, acc, mask=m_d)
                    tl.store(p_lse, first_peak)
                    last = first
            merged, merged_lse = _merged(
                states_out, p_states, start, last, acc, first_peak,
                stride_state, stride_lse_state, head_offset, m_d, BLOCK_L, BLOCK_S, BLOCK_D,
            )  # fmt: skip
            tl.store(out + row * stride_out_row + head * stride_out_head + o_d, merged, mask=m_d)
            tl.store(lse + row * heads + head, merged_lse)


def merge_states_triton(
    states: AttnState,
    row_state_indptr: Int[Tensor, " rows_plus_one"],
    carried: AttnState | None = None,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
    kept: KeptStates | None = None,
    *,
    few_states: bool = False,
    indptr_ready: bool = False,
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
    kept_arrays: tuple[Tensor | None, ...] = (None, None, None)
    if kept is not None:
        carried_out, carried_lse = kept.out, kept.lse
        kept_arrays = kept.at, kept.first, kept.fresh
    if carried_out is not None and carried_lse is not None:
        assert carried_out.stride(2) == 1, "a head's output must be contiguous"
        carried_strides = (*carried_out.stride()[:2], *carried_lse.stride())
    else:
        carried_strides = (0, 0, 0, 0)
    # a carried state may come from another stream than the states
    chained = chains(out) and carried is None
    heads_per_program = _HEADS if rows * heads >= _MANY and heads % _HEADS == 0 else 1
    few = _FEW_STATES if few_states and heads_per_program > 1 and carried_out is None else 0
    heads_per_program = _FEW_HEADS if few else heads_per_program
    block_d = triton.next_power_of_2(head_dim)
    _merge_states_kernel[(rows, heads // heads_per_program)](
        states.out, states.lse, carried_out, carried_lse, *kept_arrays, out, lse,
        row_state_indptr.contiguous(), heads,
        *states.out.stride()[:2], *states.lse.stride(), *carried_strides, *out.stride()[:2],
        HEAD_DIM=head_dim, CHAINED=chained, INDPTR_READY=indptr_ready, HEADS=heads_per_program,
        FEW=few, BLOCK_L=32, BLOCK_S=8, BLOCK_D=block_d,
        # a thread holds up to 64 numbers of a tile of states
        num_warps=max(1, block_d // 256), enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return AttnState(out, lse)
