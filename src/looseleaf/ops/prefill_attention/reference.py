"""Prefill attention, tile by tile: scores over all spans of a request, one softmax."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.prefill_attention.span_list import SpanList, require_room
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.scores.reference import gather_pages, hidden, run_positions, score, softmax_state
from looseleaf.types import AttnState, Rotation, ScoreRule


def prefill_attention_reference(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.prefill_attention`; the lse is fp64 for an fp64 query."""
    out = torch.zeros_like(q)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype, device=q.device)
    row_indptr, span_indptr = spans.tile_row_indptr.tolist(), spans.request_span_indptr.tolist()
    for tile in range(int(spans.num_tiles)):
        rows = slice(row_indptr[tile], row_indptr[tile + 1])
        request = int(spans.tile_request[tile])
        scores, values = [], []
        for span in range(span_indptr[request], span_indptr[request + 1]):
            pages, positions, exists = span_keys(spans, span, k_pages.shape[2], slot_positions)
            frame_position = spans.row_positions[rows] - spans.span_offset[span]
            distance = frame_position[:, None] - positions
            visible = exists & (distance >= 0)
            visible &= ~hidden(spans.mask_words, spans.span_mask[span : span + 1], positions)
            if rule.window:
                visible &= distance < rule.window
            # a row before the frame sees no key in it: any angle is correct
            rotated = rotate_wide(q[rows], frame_position.clamp_min(0), rotation)
            scores.append(score(rotated, gather_pages(k_pages, pages), distance, visible, rule))
            values.append(gather_pages(v_pages, pages))
        if scores:
            state = softmax_state(torch.cat(scores, -1), torch.cat(values, 1))
            out[rows], lse[rows] = state.out.to(q.dtype), state.lse.to(lse_dtype)
    return AttnState(out, lse)


def span_keys(
    spans: SpanList,
    span: int,
    page_size: int,
    slot_positions: Int[Tensor, "pages page_size"] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of a span, frame positions of their slots, and the mask of slots with a key.

    Raises InvalidOption for a span longer than its pages, and for an explicit span without
    ``slot_positions``."""
    run = slice(int(spans.span_page_indptr[span]), int(spans.span_page_indptr[span + 1]))
    pages = spans.page_indices[run].long()
    slots = run_positions(torch.arange(len(pages), device=pages.device) * page_size, page_size)
    require_room(span, int(spans.span_length[span]), len(slots))
    exists = slots < spans.span_length[span]
    if not spans.span_explicit[span]:
        return pages, slots, exists
    if slot_positions is None:
        raise InvalidOption("a span list with explicit spans needs slot_positions")
    positions = slot_positions[pages].flatten()
    return pages, positions, exists & (positions >= 0)
