"""The likeliest token on the device: every program looks at a stretch of a row, so that few rows
keep all processors busy, and then one at what the stretches of a row have come to."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next

_STRETCH = 4096
# no place in a row
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _first_of_largest(values, places, last):
    """The largest of ``values`` and the first of the ``places`` where it stands, none behind the
    ``last``."""
    largest = tl.max(values, 0)
    place = tl.min(tl.where(values == largest, places, _NOWHERE), 0)
    return largest, tl.minimum(place, last)


@triton.jit
def _stretches_kernel(
    logits, best, at, vocab, stride_row, CHAINED: tl.constexpr, STRETCH: tl.constexpr
):
    start_next(CHAINED)
    row, stretch = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = stretch * STRETCH + tl.arange(0, STRETCH)
    await_previous(CHAINED)
    value = tl.load(logits + row * stride_row + place, mask=place < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    # NaN equals nothing
    value = tl.where(value == value, value, float("-inf"))
    largest, first = _first_of_largest(value, place, vocab - 1)
    where = row * tl.num_programs(0) + stretch
    tl.store(best + where, largest)
    tl.store(at + where, first)


@triton.jit
def _row_kernel(best, at, out, stretches, last, CHAINED: tl.constexpr, BLOCK: tl.constexpr):
    start_next(CHAINED)
    row, stretch = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    known, where = stretch < stretches, row * stretches + stretch
    await_previous(CHAINED)
    value = tl.load(best + where, mask=known, other=float("-inf"))
    place = tl.load(at + where, mask=known, other=_NOWHERE)
    _, first = _first_of_largest(value, place, last)
    tl.store(out + row, first.to(tl.int64))


def likeliest_triton(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """See `looseleaf.ops.dense.likeliest`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    assert logits.stride(1) == 1, "a row must be contiguous"
    chained, stretches = chains(logits), triton.cdiv(vocab, _STRETCH)
    best = torch.empty((rows, stretches), dtype=torch.float32, device=logits.device)
    at = torch.empty((rows, stretches), dtype=torch.int32, device=logits.device)
    _stretches_kernel[(stretches, rows)](
        logits, best, at, vocab, logits.stride(0), CHAINED=chained, STRETCH=_STRETCH,
        num_warps=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    _row_kernel[(rows,)](
        best, at, out, stretches, vocab - 1, CHAINED=chained,
        BLOCK=triton.next_power_of_2(stretches), num_warps=1, enable_fp_fusion=True,
        launch_pdl=chained,
    )  # fmt: skip
    return out
