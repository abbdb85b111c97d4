"""Device functions of the attention kernels: scores of a tile, and the online softmax over tiles.

A running state is ``(acc, peak, total)``: the sum of values weighted by ``2 ** (score - peak)``,
the largest score so far, and the sum of weights. Scores are in base 2, the lse in base e."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.rotate.kernel import load_rotated, load_unrotated
from looseleaf.types import Rotation

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def await_previous(CHAINED: tl.constexpr):
    """Waits until all previous kernels are complete and their writes are visible.

    A chained kernel (programmatic dependent launch) starts while the previous one runs. Before this
    wait it may read only data that the host wrote."""
    if CHAINED:
        gdc_wait()


@triton.jit
def start_next(CHAINED: tl.constexpr):
    """Lets the next chained kernel start once all programs of this one reach this call."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def tanh(x):
    """tanh to a few ulp; the series avoids cancellation near 0."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.01, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def is_hidden(mask_words, first_word, position, visible):
    """Whether the row's bitmap hides a key: ``first_word`` [M], ``position`` [N] -> [M, N]."""
    word = tl.load(
        mask_words + first_word[:, None] + (position >> 5)[None, :],
        mask=visible & (first_word >= 0)[:, None],
        other=0,
    )
    return ((word >> (position & 31)[None, :]) & 1) != 0


@triton.jit
def is_shown(mask_words, first_word, position):
    """Whether a bitmap shared by all rows leaves a key visible: ``position`` [N] -> [N].

    ``first_word`` is the bitmap's first word, a scalar or [N]; -1 for no bitmap."""
    first_word += tl.zeros_like(position)
    word = tl.load(mask_words + first_word + (position >> 5), mask=first_word >= 0, other=0)
    return ((word >> (position & 31)) & 1) == 0


@triton.jit
def scaled_query(b_q, softmax_scale, soft_cap, CAPPED: tl.constexpr):
    """Rotated rows times the softmax scale, before they are rounded.

    The rounding error is the same as without the scale. Scores then need no multiplication: they
    are in base 2, or arguments of the soft-cap."""
    if CAPPED:
        return b_q * (softmax_scale / soft_cap)
    return b_q * (softmax_scale * LOG2_E)


@triton.jit
def scaled_rows(
    p_q, stride_d, position, cos, sin, stride_table, m_row, softmax_scale, soft_cap,
    DTYPE: tl.constexpr, CAPPED: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Rows at ``p_q`` [M], rotated to ``position`` and scaled: [M, BLOCK_D], and the same again.

    With ``BLOCK_T``, the dims that do not rotate, and [M, BLOCK_T] of those that do."""
    FIRST: tl.constexpr = ROTARY_DIM if BLOCK_T > 0 else HEAD_DIM
    b_turned = load_rotated(
        p_q, stride_d, position, cos, sin, stride_table, m_row, FIRST, ROTARY_DIM, INTERLEAVED,
        BLOCK_T if BLOCK_T > 0 else BLOCK_D,
    )  # fmt: skip
    b_turned = scaled_query(b_turned, softmax_scale, soft_cap, CAPPED).to(DTYPE)
    b_q = b_turned
    if BLOCK_T > 0:
        b_q = load_unrotated(p_q + FIRST * stride_d, stride_d, m_row, HEAD_DIM - FIRST, BLOCK_D)
        b_q = scaled_query(b_q, softmax_scale, soft_cap, CAPPED).to(DTYPE)
    return b_q, b_turned


@triton.jit
def load_tile(
    p_key, p_value, stride_d, seen, o_d, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] from dim ``FIRST`` on, and values from the same dim on. ``seen`` [N] are the keys
    to load, None for all. Without ``HAS_VALUES``, the loaded keys are the values, too."""
    o_kv = ((FIRST + o_d) * stride_d)[None, :]
    m_d = (o_d < HEAD_DIM - FIRST)[None, :]
    if seen is None and HEAD_DIM - FIRST == BLOCK_D:
        b_k = tl.load(p_key[:, None] + o_kv)
    elif seen is None:
        b_k = tl.load(p_key[:, None] + o_kv, mask=m_d, other=0.0)
    else:
        b_k = tl.load(p_key[:, None] + o_kv, mask=seen[:, None] & m_d, other=0.0)
    b_v = b_k
    if HAS_VALUES:
        if seen is None and HEAD_DIM - FIRST == BLOCK_D:
            b_v = tl.load(p_value[:, None] + o_kv)
        elif seen is None:
            b_v = tl.load(p_value[:, None] + o_kv, mask=m_d, other=0.0)
        else:
            b_v = tl.load(p_value[:, None] + o_kv, mask=seen[:, None] & m_d, other=0.0)
    return b_k, b_v


@triton.jit
def score_turned(b_q, p_key, stride_d, seen, ROTARY_DIM: tl.constexpr, BLOCK_T: tl.constexpr):
    """Products [M, N] of scaled rows [M, BLOCK_T] and the first dims of keys at ``p_key`` [N].

    ``seen`` [N] are the keys to load, None for all."""
    o_t = tl.arange(0, BLOCK_T)
    p_k = p_key[:, None] + (o_t * stride_d)[None, :]
    if seen is None and ROTARY_DIM == BLOCK_T:
        b_k = tl.load(p_k)
    elif seen is None:
        b_k = tl.load(p_k, mask=(o_t < ROTARY_DIM)[None, :], other=0.0)
    else:
        b_k = tl.load(p_k, mask=seen[:, None] & (o_t < ROTARY_DIM)[None, :], other=0.0)
    return tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")


@triton.jit
def score_tile(b_q, b_k, distance, soft_cap, slope, CAPPED: tl.constexpr, products=None):
    """Scores [M, N] in base 2 of scaled rows [M, D] and keys [N, D]; ``products`` are those of
    further dims."""
    # e4m3 keys are cast to the query's dtype; other dtypes are equal already
    scores = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), products, input_precision="ieee")
    if CAPPED:
        scores = soft_cap * LOG2_E * tanh(scores)
    if slope is not None:
        scores -= (slope * LOG2_E)[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def read_tile(
    b_q, b_turned, p_key, p_value, stride_d, seen, distance, soft_cap, slope,
    CAPPED: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """Scores [M, N] of rows of `scaled_rows` and keys at ``p_key`` [N], and the values [N, D].

    ``seen`` [N] are the keys to load, None for all. With ``BLOCK_T``, values begin after the
    rotated dims; without ``HAS_VALUES``, the keys are the values."""
    products = None
    if BLOCK_T > 0:
        products = score_turned(b_turned, p_key, stride_d, seen, ROTARY_DIM, BLOCK_T)
    FIRST: tl.constexpr = ROTARY_DIM if BLOCK_T > 0 else 0
    o_d = tl.arange(0, BLOCK_D)
    b_k, b_v = load_tile(p_key, p_value, stride_d, seen, o_d, HEAD_DIM, FIRST, BLOCK_D, HAS_VALUES)
    return score_tile(b_q, b_k, distance, soft_cap, slope, CAPPED, products), b_v


@triton.jit
def fold_tile(scores, b_v, acc, peak, total, CHECKED: tl.constexpr):
    """The running state with one more tile of keys. Without ``CHECKED``, every row sees a key of
    the tile."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    pivot = new_peak
    if CHECKED:
        # a row without keys so far: a finite pivot keeps its weights 0, not NaN
        pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(scores - pivot[:, None])
    shrink = tl.exp2(peak - pivot)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(b_v.dtype), b_v, acc, input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def slots_of_tile(start, o_n, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ordinal in the run, and slot in the page, of each key of the tile at ``start``."""
    if BLOCK_N % PAGE_SIZE == 0:
        # slots are the same in all tiles: the compiler hoists them out of the loop
        return start // PAGE_SIZE + o_n // PAGE_SIZE, o_n % PAGE_SIZE
    else:
        return (start + o_n) // PAGE_SIZE, (start + o_n) % PAGE_SIZE


@triton.jit
def finish(acc, peak, total):
    """``(out, lse)`` of the running state; ``(0, -inf)`` without keys."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
    return acc / total[:, None], lse


@triton.jit
def store_zeros(p_out, m_row, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the first ``DIMS`` of the outputs at ``p_out`` [M]: no value has these dims."""
    o_t = tl.arange(0, BLOCK)
    m_t = m_row[:, None] & (o_t < DIMS)[None, :]
    tl.store(p_out[:, None] + o_t[None, :], 0.0, mask=m_t)


def latent_blocks(rotation: Rotation, head_dim: int) -> tuple[int, int]:
    """``BLOCK_D`` and ``BLOCK_T`` of latent keys: of their values, and of the rotated dims."""
    values = head_dim - rotation.rotary_dim
    return max(16, triton.next_power_of_2(values)), max(
        16, triton.next_power_of_2(rotation.rotary_dim)
    )


def tile_stages(block_n: int, block_d: int, itemsize: int) -> int:
    """Pipeline stages with which tiles of K and V fit half of an SM's shared memory."""
    return 2 if 2 * 2 * block_n * block_d * itemsize <= 98304 else 1


def chains(tensor: Tensor) -> bool:
    """Whether the device supports programmatic dependent launch."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
