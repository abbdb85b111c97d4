"""A counting sort of rows by expert on the device.

Few pairs are sorted by one program. More are counted by block, a program sums the counts, and
blocks place their pairs."""

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next

# pairs that one program sorts
_MAX_FEW = 1024
# pairs of a block, and values of the table of pairs and experts that a program has at a time
_BLOCK_PAIRS, _TABLE = 1024, 8192
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _one_hot(experts, start, end, o_e, BLOCK_A: tl.constexpr):
    """Pairs against experts [A, E], 1 where they meet."""
    o_a = start + tl.arange(0, BLOCK_A)
    b_experts = tl.load(experts + o_a, mask=o_a < end, other=-1)
    return (b_experts[:, None] == o_e[None, :]).to(tl.int32)


@triton.jit
def _count(experts, start, end, o_e, BLOCK_A: tl.constexpr):
    """Pairs of each expert in a stretch."""
    counts = tl.zeros((o_e.shape[0],), tl.int32)
    for first in range(start, end, BLOCK_A):
        counts += tl.sum(_one_hot(experts, first, end, o_e, BLOCK_A), 0)
    return counts


@triton.jit
def _place(experts, order, places, start, end, o_e, BLOCK_A: tl.constexpr):
    """Writes the pairs of a stretch in turn to the next of each expert's ``places``."""
    for first in range(start, end, BLOCK_A):
        table = _one_hot(experts, first, end, o_e, BLOCK_A)
        o_a = first + tl.arange(0, BLOCK_A)
        rank = tl.sum(table * (tl.cumsum(table, 0) - 1 + places[None, :]), 1)
        tl.store(order + rank, o_a, mask=o_a < end)
        places += tl.sum(table, 0)


@triton.jit
def _write_tiles(
    tiles, counts, firsts, o_e, num_tiles, TILE: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """The table of tiles of experts with ``counts`` places from ``firsts`` on."""
    used = (counts + TILE - 1) // TILE
    start = tl.cumsum(used, 0) - used
    for n in range(0, tl.max(used, 0)):
        inside = n < used
        p_tile = tiles + (start + n) * 3
        first = firsts + n * TILE
        tl.store(p_tile, o_e, mask=inside)
        tl.store(p_tile + 1, first, mask=inside)
        tl.store(p_tile + 2, tl.minimum(first + TILE, firsts + counts), mask=inside)
    for unused in range(tl.sum(used, 0), num_tiles, BLOCK_T):
        o_t = unused + tl.arange(0, BLOCK_T)
        for column in tl.static_range(3):
            value = tl.full((BLOCK_T,), -1 if column == 0 else 0, tl.int32)
            tl.store(tiles + o_t * 3 + column, value, mask=o_t < num_tiles)


@triton.jit(do_not_specialize=["pairs", "num_tiles"])
def _group_few_kernel(
    experts, order, tiles, pairs, num_tiles,
    CHAINED: tl.constexpr, TILE: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    o_e = tl.arange(0, BLOCK_E)
    await_previous(CHAINED)
    counts = _count(experts, 0, pairs, o_e, BLOCK_A)
    firsts = tl.cumsum(counts, 0) - counts
    _write_tiles(tiles, counts, firsts, o_e, num_tiles, TILE, 64)
    _place(experts, order, firsts, 0, pairs, o_e, BLOCK_A)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    experts, counts, pairs, BLOCK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    block, o_e = tl.program_id(0), tl.arange(0, BLOCK_E)
    end = tl.minimum((block + 1) * BLOCK, pairs)
    tl.store(counts + block * BLOCK_E + o_e, _count(experts, block * BLOCK, end, o_e, BLOCK_A))


@triton.jit(do_not_specialize=["num_blocks", "num_tiles"])
def _sum_kernel(
    counts, places, tiles, num_blocks, num_tiles,
    TILE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Each block's first place of each expert, and the table of tiles."""
    o_b, o_e = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_E)
    totals = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        p = counts + (first + o_b)[:, None] * BLOCK_E + o_e[None, :]
        totals += tl.sum(tl.load(p, mask=(first + o_b < num_blocks)[:, None], other=0), 0)
    firsts = tl.cumsum(totals, 0) - totals
    _write_tiles(tiles, totals, firsts, o_e, num_tiles, TILE, 64)
    running = firsts
    for first in range(0, num_blocks, BLOCK_B):
        offsets = (first + o_b)[:, None] * BLOCK_E + o_e[None, :]
        inside = (first + o_b < num_blocks)[:, None]
        b_counts = tl.load(counts + offsets, mask=inside, other=0)
        before = tl.cumsum(b_counts, 0) - b_counts + running[None, :]
        tl.store(places + offsets, before, mask=inside)
        running += tl.sum(b_counts, 0)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    experts, order, places, pairs,
    BLOCK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    block, o_e = tl.program_id(0), tl.arange(0, BLOCK_E)
    own = tl.load(places + block * BLOCK_E + o_e)
    end = tl.minimum((block + 1) * BLOCK, pairs)
    _place(experts, order, own, block * BLOCK, end, o_e, BLOCK_A)


def group_rows_triton(
    experts: Int[Tensor, "rows slots"], num_experts: int, tile: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, "tiles 3"]]:
    """See `looseleaf.ops.experts.group`."""
    from looseleaf.ops.experts.group import most_tiles

    assert experts.is_contiguous(), "pairs lie side by side"
    pairs, device = experts.numel(), experts.device
    num_tiles = most_tiles(pairs, num_experts, tile)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    if not pairs:
        return order, tiles
    block_e = triton.next_power_of_2(num_experts)
    block_a = min(max(1, _TABLE // block_e), _BLOCK_PAIRS)
    if pairs <= _MAX_FEW:
        chained = chains(experts)
        _group_few_kernel[(1,)](
            experts, order, tiles, pairs, num_tiles, CHAINED=chained, TILE=tile,
            BLOCK_A=block_a, BLOCK_E=block_e,
            **_OPTIONS, launch_pdl=chained,
        )  # fmt: skip
        return order, tiles
    blocks = triton.cdiv(pairs, _BLOCK_PAIRS)
    counts = torch.empty((blocks, block_e), dtype=torch.int32, device=device)
    places = torch.empty_like(counts)
    sizes = {"BLOCK": _BLOCK_PAIRS, "BLOCK_A": block_a, "BLOCK_E": block_e, **_OPTIONS}
    _count_kernel[(blocks,)](experts, counts, pairs, **sizes)
    _sum_kernel[(1,)](
        counts, places, tiles, blocks, num_tiles,
        TILE=tile, BLOCK_B=max(1, _TABLE // block_e), BLOCK_E=block_e, **_OPTIONS,
    )  # fmt: skip
    _place_kernel[(blocks,)](experts, order, places, pairs, **sizes)
    return order, tiles
