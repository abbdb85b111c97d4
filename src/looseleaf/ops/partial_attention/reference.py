"""Partial attention, item by item: gather the keys, rotate the rows to the frame, apply softmax."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.scores.reference import gather_pages, hidden, run_positions, score, softmax_state
from looseleaf.types import AttnState, Rotation, ScoreRule


def partial_attention_reference(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`; fp64 for an fp64 query."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((work.state_capacity, *q.shape[1:]), dtype=dtype, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    group = q.shape[1] // k_pages.shape[1]
    page_indptr, entry_indptr = work.item_page_indptr.tolist(), work.item_entry_indptr.tolist()
    for item in range(int(work.num_items)):
        run = slice(page_indptr[item], page_indptr[item + 1])
        pages = work.page_indices[run].long()
        if work.item_explicit[item]:
            if slot_positions is None:
                raise InvalidOption("a work list with explicit items needs slot_positions")
            positions = slot_positions[pages].flatten()
        else:
            positions = run_positions(work.page_positions[run], k_pages.shape[2])

        entries = slice(entry_indptr[item], entry_indptr[item + 1])
        rows, bound = work.entry_row[entries].long(), work.entry_bound[entries]
        frame_position = work.row_positions[rows] - work.entry_offset[entries]
        distance = frame_position[:, None] - positions
        visible = (positions >= 0) & (positions < bound[:, None])
        visible &= ~hidden(work.mask_words, work.entry_mask[entries], positions)
        visible &= ~_already_read(work, run, len(rows)).repeat_interleave(k_pages.shape[2], 1)
        if rule.window:
            visible &= distance < rule.window

        # a row before the frame sees no key in it: any angle is correct
        rotated = rotate_wide(q[rows], frame_position.clamp_min(0), rotation)
        scores = score(rotated, gather_pages(k_pages, pages), distance, visible, rule)
        state = softmax_state(scores, gather_pages(v_pages, pages))

        kv_head = int(work.item_kv_head[item])
        heads = slice(None) if kv_head < 0 else slice(kv_head * group, (kv_head + 1) * group)
        states = work.entry_state[entries].long()
        out[states, heads] = state.out[:, heads].to(dtype)
        lse[states, heads] = state.lse[:, heads].to(dtype)
    return AttnState(out, lse)


def _already_read(work: WorkList, run: slice, entries: int) -> Bool[Tensor, "entries pages"]:
    """Pages of an item that its entries have already read, by ``page_seen``."""
    nth = torch.arange(entries, device=work.page_indices.device)
    bits = torch.zeros(run.stop - run.start, dtype=torch.int32, device=nth.device)
    if work.page_seen is not None:
        page_bits = work.page_seen[run]
        bits[: len(page_bits)] = page_bits
    return (bits & ((1 << nth[:, None]) - 1)) != 0
