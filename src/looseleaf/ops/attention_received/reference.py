"""Attention received, tile by tile: weights from scores and the rows' lse, then the maximum."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.attention_received.readers import Readers
from looseleaf.ops.prefill_attention.reference import span_keys
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.scores.reference import gather_pages, hidden, score
from looseleaf.types import Rotation, ScoreRule


def attention_received_reference(
    readers: Readers,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    num_keys: int,
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """See `looseleaf.ops.attention_received`."""
    starts = [0, *spans.span_length.cumsum(0).tolist()]
    best = torch.zeros(num_keys, dtype=torch.float32, device=k_pages.device)
    row_indptr, span_indptr = spans.tile_row_indptr.tolist(), spans.request_span_indptr.tolist()
    for tile in range(int(spans.num_tiles)):
        rows = slice(row_indptr[tile], row_indptr[tile + 1])
        # a row without keys has an lse of -inf and only hidden keys here
        lse = readers.lse[rows]
        pivot = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        before, factor = readers.before[rows, None], readers.weight[rows, None, None]
        request = int(spans.tile_request[tile])
        for span in range(span_indptr[request], span_indptr[request + 1]):
            pages, positions, exists = span_keys(spans, span, k_pages.shape[2], None)
            offset = spans.span_offset[span]
            frame_position = spans.row_positions[rows] - offset
            distance = frame_position[:, None] - positions
            visible = exists & (distance >= 0) & (offset + positions < before)
            visible &= ~hidden(spans.mask_words, spans.span_mask[span : span + 1], positions)
            if rule.window:
                visible &= distance < rule.window
            rotated = rotate_wide(readers.q[rows].float(), frame_position.clamp_min(0), rotation)
            scores = score(rotated, gather_pages(k_pages, pages), distance, visible, rule)
            weight = ((scores - pivot).exp() * factor).amax((0, 1))
            of_span = best[starts[span] : starts[span + 1]]
            torch.maximum(of_span, weight[: len(of_span)].float(), out=of_span)
    return best
