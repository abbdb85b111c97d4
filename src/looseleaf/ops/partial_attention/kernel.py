"""Partial attention on the device: persistent programs over the units (item, KV head) of a work
list.

Query heads of a KV head are packed into rows ("packed row" = entry × query head), so that a tile of
keys is loaded once for all of them. A packed row is rotated to the item's frame once; keys are
never rotated. Keys that every row sees are loaded without masks."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.hopper import attention as hopper_attention
from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.rotate.kernel import table
from looseleaf.ops.scores.kernel import (
    await_previous,
    chains,
    finish,
    fold_tile,
    is_hidden,
    is_shown,
    latent_blocks,
    read_tile,
    scaled_rows,
    slots_of_tile,
    start_next,
    store_zeros,
    tile_stages,
)
from looseleaf.types import AttnState, Rotation, ScoreRule

# the interpreter runs programs one after another
_INTERPRETED_PROGRAMS = 3
# 32-bit registers per SM
_REGISTERS = 65536


@triton.jit
def _plain_slots(
    page_positions, first_page, num_pages, bound, is_plain, m_row,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Number of leading slots, in whole tiles, that every row sees."""
    last_page = first_page + tl.maximum(num_pages, 1) - 1
    first_position = tl.load(page_positions + first_page, mask=num_pages > 0, other=0)
    last_position = tl.load(page_positions + last_page, mask=num_pages > 0, other=0)
    num_slots = num_pages * PAGE_SIZE
    least_bound = tl.min(tl.where(m_row, bound, 2147483647), 0)
    is_run = last_position - first_position == num_slots - PAGE_SIZE
    # selected pages have gaps: without a look at each, only the last page may cross the bound
    before_last = tl.where(last_position <= least_bound, num_slots - PAGE_SIZE, 0)
    seen = tl.where(is_run, least_bound - first_position, before_last)
    seen = tl.where(last_position + PAGE_SIZE <= least_bound, num_slots, seen)
    seen = tl.minimum(tl.maximum(seen, 0), num_slots)
    return tl.where(is_plain, seen // BLOCK_N * BLOCK_N, 0)


@triton.jit
def _is_read(page_seen, num_seen, ordinal, row_bits, m_page):
    """Whether rows [M] have already read the pages at ``ordinal`` [N] of the list."""
    bits = tl.load(page_seen + ordinal, mask=m_page & (ordinal < num_seen), other=0)
    return (bits[None, :] & row_bits[:, None]) != 0


@triton.jit
def _partial_attention_kernel(
    q, k_pages, v_pages, out, lse, cos, sin, slopes, slot_positions,
    first_item, end_item, item_page_indptr, item_entry_indptr, item_kv_head, item_explicit,
    page_indices, page_positions, entry_row, entry_offset, entry_bound, entry_mask, entry_state,
    mask_words, row_positions, page_seen, num_seen,
    stride_q_row, stride_q_head, stride_q_d,
    stride_page, stride_page_head, stride_slot, stride_d,
    stride_out_state, stride_out_head, stride_lse_state, stride_table, stride_positions,
    softmax_scale, soft_cap, window,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHAINED: tl.constexpr, WIDENED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    begin = 0
    if first_item is not None:
        begin = tl.load(first_item)
    # items filled on the device have one KV head
    HEADS: tl.constexpr = 1 if CHOSEN else NUM_KV_HEADS
    num_units = (tl.load(end_item) - begin) * HEADS
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item, kv_head = begin + unit // HEADS, unit % HEADS
        only_head = tl.load(item_kv_head + item)
        if CHOSEN:
            kv_head = only_head
        if (only_head < 0) | (only_head == kv_head):
            _attend_item(
                q, k_pages, v_pages, out, lse, cos, sin, slopes, slot_positions,
                item, kv_head, item_page_indptr, item_entry_indptr, item_explicit,
                page_indices, page_positions, entry_row, entry_offset, entry_bound, entry_mask,
                entry_state, mask_words, row_positions, page_seen, num_seen,
                stride_q_row, stride_q_head, stride_q_d,
                stride_page, stride_page_head, stride_slot, stride_d,
                stride_out_state, stride_out_head, stride_lse_state, stride_table,
                stride_positions, softmax_scale, soft_cap, window,
                GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE, INTERLEAVED, CAPPED, WINDOWED,
                CHAINED, CHAINED and CHOSEN, WIDENED, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_T,
            )  # fmt: skip
    await_previous(CHAINED)


@triton.jit
def _attend_item(
    q, k_pages, v_pages, out, lse, cos, sin, slopes, slot_positions,
    item, kv_head, item_page_indptr, item_entry_indptr, item_explicit,
    page_indices, page_positions, entry_row, entry_offset, entry_bound, entry_mask,
    entry_state, mask_words, row_positions, page_seen, num_seen,
    stride_q_row, stride_q_head, stride_q_d,
    stride_page, stride_page_head, stride_slot, stride_d,
    stride_out_state, stride_out_head, stride_lse_state, stride_table, stride_positions,
    softmax_scale, soft_cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, CHAINED: tl.constexpr, FILLED: tl.constexpr, WIDENED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # the first dim with a value: latent keys rotate in the dims before
    FIRST: tl.constexpr = ROTARY_DIM if BLOCK_T > 0 else 0
    first_entry = tl.load(item_entry_indptr + item)
    num_packed = (tl.load(item_entry_indptr + item + 1) - first_entry) * GROUP
    explicit = tl.load(item_explicit + item)
    # the previous kernel writes the selected pages and their positions
    await_previous(FILLED)
    first_page = tl.load(item_page_indptr + item)
    num_pages = tl.load(item_page_indptr + item + 1) - first_page
    num_slots = num_pages * PAGE_SIZE
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM - FIRST)[None, :]
    k_head, v_head = k_pages + kv_head * stride_page_head, v_pages + kv_head * stride_page_head

    for first in range(tl.program_id(1) * BLOCK_M, num_packed, tl.num_programs(1) * BLOCK_M):
        m_row = first + o_m < num_packed
        entry = first_entry + (first + o_m) // GROUP
        head = kv_head * GROUP + (first + o_m) % GROUP
        row = tl.load(entry_row + entry, mask=m_row, other=0).to(tl.int64)
        bound = tl.load(entry_bound + entry, mask=m_row, other=0)
        frame_position = tl.load(row_positions + row, mask=m_row, other=0) - tl.load(
            entry_offset + entry, mask=m_row, other=0
        )
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=m_row, other=0.0)
        # the n-th entry skips a page if one of the page's lowest n bits is set
        row_bits = (1 << tl.minimum((first + o_m) // GROUP, 30)) - 1
        is_plain = not WINDOWED
        if slot_positions is not None:
            is_plain &= explicit == 0
        if mask_words is not None:
            first_word = tl.load(entry_mask + entry, mask=m_row, other=-1)
            one_word = tl.max(first_word, 0)
            is_plain &= one_word < 0
            # rows of one request share a bitmap, the usual case
            same_mask = tl.min(tl.where(m_row, first_word, one_word), 0) == one_word
        plain_end = _plain_slots(
            page_positions, first_page, num_pages, bound, is_plain, m_row, PAGE_SIZE, BLOCK_N
        )
        await_previous(CHAINED)
        # a row before the frame sees no key in it: any angle is correct
        DTYPE: tl.constexpr = q.dtype.element_ty if WIDENED else k_pages.dtype.element_ty
        b_q, b_turned = scaled_rows(
            q + row * stride_q_row + head * stride_q_head, stride_q_d,
            tl.maximum(frame_position, 0), cos, sin, stride_table, m_row, softmax_scale, soft_cap,
            DTYPE, CAPPED, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D, BLOCK_T,
        )  # fmt: skip  # [M, D], [M, T]

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, plain_end, BLOCK_N):
            ordinal, slot = slots_of_tile(start, o_n, PAGE_SIZE, BLOCK_N)
            page = tl.load(page_indices + first_page + ordinal).to(tl.int64)
            distance = None
            if slopes is not None:
                position = tl.load(page_positions + first_page + ordinal) + slot
                distance = frame_position[:, None] - position[None, :]
            o_key = page * stride_page + slot * stride_slot
            scores, b_v = read_tile(
                b_q, b_turned, k_head + o_key, v_head + o_key, stride_d, None, distance, soft_cap,
                slope, CAPPED, HEAD_DIM, ROTARY_DIM, BLOCK_D, BLOCK_T, BLOCK_T == 0,
            )  # fmt: skip
            if page_seen is not None:
                is_read = _is_read(page_seen, num_seen, first_page + ordinal, row_bits, o_n >= 0)
                scores = tl.where(is_read, float("-inf"), scores)
            acc, peak, total = fold_tile(
                scores, b_v.to(b_q.dtype), acc, peak, total, page_seen is not None
            )

        last_bound = tl.max(bound, 0)
        for start in range(plain_end, num_slots, BLOCK_N):
            in_run = start + o_n < num_slots
            ordinal, slot = slots_of_tile(start, o_n, PAGE_SIZE, BLOCK_N)
            page = tl.load(page_indices + first_page + ordinal, mask=in_run, other=0).to(tl.int64)
            position = tl.load(page_positions + first_page + ordinal, mask=in_run, other=0) + slot
            if slot_positions is not None:
                p_position = slot_positions + page * stride_positions + slot
                m_explicit = in_run & (explicit + tl.zeros_like(slot) != 0)
                b_position = tl.load(p_position, mask=m_explicit, other=-1)
                position = tl.where(m_explicit, b_position, position)
            # keys that no row sees are not loaded: their page is undefined
            seen = in_run & (position >= 0) & (position < last_bound)
            if mask_words is not None:
                word = tl.where(seen & same_mask, one_word, -1)
                seen &= is_shown(mask_words, word, position)
            visible = seen[None, :] & (position[None, :] < bound[:, None])  # [M, N]
            distance = frame_position[:, None] - position[None, :]
            if WINDOWED:
                visible &= distance < window
            if page_seen is not None:
                visible &= ~_is_read(page_seen, num_seen, first_page + ordinal, row_bits, in_run)
            if mask_words is not None:  # noqa: SIM102 - the outer condition is static, the inner is not
                if not same_mask:
                    visible &= ~is_hidden(mask_words, first_word, position, visible)
                    seen = tl.max(visible.to(tl.int32), 0) > 0
            if WINDOWED:
                seen = tl.max(visible.to(tl.int32), 0) > 0

            o_key = page * stride_page + slot * stride_slot
            scores, b_v = read_tile(
                b_q, b_turned, k_head + o_key, v_head + o_key, stride_d, seen, distance, soft_cap,
                slope, CAPPED, HEAD_DIM, ROTARY_DIM, BLOCK_D, BLOCK_T, BLOCK_T == 0,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
            acc, peak, total = fold_tile(scores, b_v.to(b_q.dtype), acc, peak, total, True)

        b_out, b_lse = finish(acc, peak, total)
        state = tl.load(entry_state + entry, mask=m_row, other=0).to(tl.int64)
        p_out = out + state * stride_out_state + head * stride_out_head
        tl.store(p_out[:, None] + FIRST + o_d[None, :], b_out, mask=m_row[:, None] & m_d)
        if BLOCK_T > 0:
            store_zeros(p_out, m_row, FIRST, BLOCK_T)
        tl.store(lse + state * stride_lse_state + head, b_lse, mask=m_row)


def partial_attention_triton(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`."""
    _, num_qo_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not work.whole:
        out = q.new_empty((work.state_capacity, *q.shape[1:]), dtype=torch.float32)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    if not work.complete:
        lse.fill_(-torch.inf)
    items, group = work.item_kv_head.shape[0], num_qo_heads // num_kv_heads
    if not items or not out.numel():
        return AttnState(out, lse)
    assert slot_positions is None or slot_positions.stride(1) == 1, "slots must be contiguous"
    assert k_pages.stride() == v_pages.stride(), "K and V pages must be laid out alike"
    block_d, block_t = triton.next_power_of_2(head_dim), 0
    if same_memory(k_pages, v_pages):
        block_d, block_t = latent_blocks(rotation, head_dim)
    chained, inputs_ready = chains(q), False
    seen_arguments = (None, 0) if work.page_seen is None else (work.page_seen, len(work.page_seen))
    latent = block_t > 0
    for tile, first_item, end_item, row_programs in _launches(
        work, group, block_d, k_pages, latent=latent
    ):
        units = items if tile.chosen else items * num_kv_heads
        # unplanned lists may have pages that no row sees, which this kernel cannot skip
        if (
            first_item is not None
            and not tile.chosen
            and not block_t
            and hopper_attention.serves(k_pages, rule)
            and not work.mask_words.numel()
            and slot_positions is None
        ):
            from looseleaf.ops.hopper.attention.kernel import Grid, launch

            num_warpgroups = 2 if tile.block_m >= hopper_attention.PACKED_ROWS else 1
            grid = Grid(
                min(_num_sms(q) * (3 - num_warpgroups), units), num_warpgroups, inputs_ready
            )
            inputs_ready = True
            lists = _hopper_arrays(work, first_item, end_item)
            pages, state = (k_pages, v_pages), (out, lse)
            launch(q, pages, lists, work.page_indices, state, rotation, rule, grid)
            continue
        programs = min(_num_sms(q) * tile.programs_per_sm, units)
        _partial_attention_kernel[(programs, row_programs)](
            q, k_pages, v_pages, out, lse, *table(rotation), rule.alibi_slopes, slot_positions,
            first_item, end_item, work.item_page_indptr, work.item_entry_indptr,
            work.item_kv_head, work.item_explicit, work.page_indices, work.page_positions,
            work.entry_row, work.entry_offset, work.entry_bound, work.entry_mask, work.entry_state,
            work.mask_words if work.mask_words.numel() else None, work.row_positions,
            *(seen_arguments if tile.chosen or first_item is None else (None, 0)),
            *q.stride(), *k_pages.stride(), *out.stride()[:2], lse.stride(0),
            rotation.cos.stride(0), slot_positions.stride(0) if slot_positions is not None else 0,
            rule.softmax_scale, rule.soft_cap, rule.window,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
            ROTARY_DIM=rotation.rotary_dim, PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved,
            CAPPED=rule.soft_cap != 0, WINDOWED=rule.window != 0,
            CHAINED=chained, WIDENED=k_pages.dtype is FP8, CHOSEN=tile.chosen,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_T=block_t,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
            launch_pdl=chained, maxnreg=_max_registers(tile, k_pages, work),
        )  # fmt: skip
    return AttnState(out, lse)


def _launches(
    work: WorkList, group: int, block_d: int, pages: Tensor, *, latent: bool
) -> list[tuple[Tile, Tensor | None, Tensor, int]]:
    """Tile, first and end item, and programs per unit of every launch."""
    if work.tile_indptr is not None:
        bounds = work.tile_indptr
        # the widest tile first: narrow tiles fill the SMs that become idle at its end
        tiles = reversed([*enumerate(work.tiles)])
        return [(t, bounds[n:], bounds[n + 1 :], 1) for n, t in tiles if not t.finishing]
    items = work.item_kv_head.shape[0]
    packed_rows, itemsize = work.state_capacity * group / items, pages.element_size()
    tile = plain_tile(packed_rows, block_d, itemsize, latent=latent)
    # only the device has the rows of each item: programs loop over blocks beyond the grid
    row_programs = min(4, triton.cdiv(work.state_capacity * group, tile.block_m))
    return [(tile, None, work.num_items, row_programs)]


def _max_registers(tile: Tile, k_pages: Tensor, work: WorkList) -> int | None:
    """Register limit per thread for ``programs_per_sm`` programs on an SM.

    None without a limit: the limit is the hardware's, or fewer programs with more registers are
    faster (16- and 32-bit keys without ``page_seen``)."""
    if k_pages.dtype is not FP8 and work.page_seen is None:
        return None
    share = _REGISTERS // (tile.programs_per_sm * tile.num_warps * 32) // 8 * 8
    return share if share < 256 else None


def _num_sms(tensor: Tensor) -> int:
    """Number of SMs, one program each at a time."""
    if not tensor.is_cuda:
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def plain_tile(packed_rows: float, block_d: int, itemsize: int, *, latent: bool = False) -> Tile:
    """The tile of an unplanned list with ``packed_rows`` packed rows per item on average."""
    if latent:
        is_wide, block_n = packed_rows > 16 and itemsize < 4, 32 if itemsize < 4 else 16
        return Tile(64 if is_wide else 16, block_n, 8 if is_wide else 4, 2, 1)
    block_n = (64 if itemsize < 4 else 32) // (1 if block_d <= 128 else 2)
    block_m = max(16, min(block_n, triton.next_power_of_2(round(packed_rows))))
    return Tile(block_m, block_n, 4, tile_stages(block_n, block_d, itemsize), 2)


def _hopper_arrays(work: WorkList, first_item: Tensor, end_item: Tensor) -> tuple[Tensor, ...]:
    """The arrays of a planned work list in the order of the Hopper kernel."""
    assert work.item_numbers is not None and work.entry_numbers is not None, (
        "a planned list has them"
    )
    return first_item, end_item, work.item_numbers, work.entry_numbers, work.page_positions
