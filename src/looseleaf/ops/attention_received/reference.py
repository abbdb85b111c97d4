"""Attention received, tile by tile: weights from scores and the rows' lse, then the largest."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.prefill_attention.reference import span_keys
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.rotate.reference import turn
from looseleaf.ops.scores.reference import gather_pages, hidden, score
from looseleaf.types import AttnState, Rotation, ScoreRule


def attention_received_reference(
    q: Float[Tensor, "rows qo_heads head_dim"],
    state: AttnState,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    readers: Int[Tensor, "2 rows"] | Float[Tensor, "2 rows"],
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """See `looseleaf.ops.attention_received`."""
    starts = [0, *spans.span_length.cumsum(0).tolist()]
    best = torch.zeros(starts[-1], dtype=torch.float32, device=q.device)
    row_indptr, span_indptr = spans.tile_row_indptr.tolist(), spans.request_span_indptr.tolist()
    for tile in range(int(spans.num_tiles)):
        rows = slice(row_indptr[tile], row_indptr[tile + 1])
        # a row that saw no key has a lse of -inf and only hidden keys here
        pivot = state.lse[rows].masked_fill(state.lse[rows] == -torch.inf, 0.0)[..., None]
        request = int(spans.tile_request[tile])
        for span in range(span_indptr[request], span_indptr[request + 1]):
            pages, positions, exists = span_keys(spans, span, k_pages.shape[2], None)
            offset = spans.span_offset[span]
            frame_position = spans.row_positions[rows] - offset
            distance = frame_position[:, None] - positions
            visible = exists & (distance >= 0) & (offset + positions < readers[1, rows, None])
            visible &= ~hidden(spans.mask_words, spans.span_mask[span : span + 1], positions)
            if rule.window:
                visible &= distance < rule.window
            turned = turn(q[rows].float(), frame_position.clamp_min(0), rotation)
            scores = score(turned, gather_pages(k_pages, pages), distance, visible, rule)
            weight = ((scores - pivot).exp() * readers[0, rows, None, None]).amax((0, 1))
            of_span = best[starts[span] : starts[span + 1]]
            torch.maximum(of_span, weight[: len(of_span)].float(), out=of_span)
    return best
