"""Device functions of the attention kernels: one tile of scores, and the online softmax over tiles.

A running state is ``(acc, peak, total)``: the values weighted by ``exp(score - peak)``, the largest
score so far, and the sum of the weights.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Exact to a few units in the last place, also near 0, where the exponential cancels."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.01, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def is_hidden(mask_words, first_word, position, visible):
    """Whether the row's bitmap hides the key: ``first_word`` [M], ``position`` [N] -> [M, N]."""
    word = tl.load(
        mask_words + first_word[:, None] + (position >> 5)[None, :],
        mask=visible & (first_word >= 0)[:, None],
        other=0,
    )
    return ((word >> (position & 31)[None, :]) & 1) != 0


@triton.jit
def score_tile(b_q, b_k, distance, visible, softmax_scale, soft_cap, slope, CAPPED: tl.constexpr):
    """Scores [M, N] of turned rows [M, D] and keys [N, D], by the rule; -inf where not visible."""
    scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * softmax_scale
    if CAPPED:
        scores = soft_cap * tanh(scores / soft_cap)
    if slope is not None:
        scores -= slope[:, None] * distance.to(tl.float32)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def fold_tile(scores, b_v, acc, peak, total):
    """The running state with one more tile of keys in it."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # a row may have seen no key yet: a finite pivot keeps its weights 0, not NaN
    pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp(scores - pivot[:, None])
    shrink = tl.exp(peak - pivot)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    acc += tl.dot(weight.to(b_v.dtype), b_v, input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def finish(acc, peak, total):
    """``(out, lse)`` of the running state: ``(0, -inf)`` if no key was seen."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), peak + tl.log(total))
    return acc / total[:, None], lse


def tile_stages(block_n: int, block_d: int, itemsize: int) -> int:
    """Pipeline stages whose tiles of keys and values fit half of a streaming multiprocessor."""
    return 2 if 2 * 2 * block_n * block_d * itemsize <= 98304 else 1
