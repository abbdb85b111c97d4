"""Attention received on the CPU: one product per request, over the keys of all its spans.

Keys are rotated to their positions in the prompt once, instead of the queries once per span and
tile. `attention_received_reference` defines the result."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.ops.attention_received.readers import Readers
from looseleaf.ops.attention_received.reference import attention_received_reference
from looseleaf.ops.page_dtypes import widen
from looseleaf.ops.prefill_attention.reference import span_keys
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.scores.reference import hidden, score
from looseleaf.types import Rotation, ScoreRule

# of one product: 16 MiB in fp32
_MOST_SCORES = 1 << 22


@dataclass(frozen=True)
class _Keys:
    """The keys of a request, ``rotated`` to their ``places`` in the prompt; a mask hides some."""

    rotated: Float[Tensor, "kv_heads keys head_dim"]
    places: Int[Tensor, " keys"]
    is_hidden: Bool[Tensor, " keys"]


def attention_received_cpu(
    readers: Readers,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    num_keys: int,
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """See `looseleaf.ops.attention_received`."""
    if bool((spans.span_offset < 0).any()):
        # keys are rotated forward only
        return attention_received_reference(readers, k_pages, spans, num_keys, rotation, rule)
    best = torch.zeros(num_keys, dtype=torch.float32)
    starts = [0, *spans.span_length.cumsum(0).tolist()]
    tiles, span_indptr = int(spans.num_tiles), spans.request_span_indptr.tolist()
    row_indptr, owner = spans.tile_row_indptr.tolist(), spans.tile_request.numpy()[:tiles]
    # consecutive tiles of a request are one block of rows
    for first, last in pairwise([*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), tiles]):
        request = int(owner[first])
        own = range(span_indptr[request], span_indptr[request + 1])
        of_request = best[starts[own.start] : starts[own.stop]]
        if not len(of_request):
            continue
        keys = _keys_of(spans, own, k_pages, rotation)
        step = max(1, _MOST_SCORES // (readers.q.shape[1] * len(of_request)))
        for start in range(row_indptr[first], row_indptr[last], step):
            rows = slice(start, min(start + step, row_indptr[last]))
            places = spans.row_positions[rows]
            received = _received(readers, rows, places, keys, rotation, rule)
            torch.maximum(of_request, received, out=of_request)
    return best


def _keys_of(spans: SpanList, own: range, k_pages: Tensor, rotation: Rotation) -> _Keys:
    """The keys of the spans ``own``."""
    page_size, parts = k_pages.shape[2], []
    for span in own:
        pages, positions, _ = span_keys(spans, span, page_size, None)
        length = int(spans.span_length[span])
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        offsets = spans.span_offset[span].expand(length)
        mask = hidden(spans.mask_words, spans.span_mask[span : span + 1], positions[:length])[0]
        parts.append((slots, offsets, offsets + positions[:length], mask))
    slots, offsets, places, is_hidden = (torch.cat(column) for column in zip(*parts, strict=True))
    stored = widen(k_pages[slots // page_size, :, slots % page_size])
    return _Keys(rotate_wide(stored, offsets, rotation).transpose(0, 1), places, is_hidden)


def _received(
    readers: Readers,
    rows: slice,
    places: Int[Tensor, " rows"],
    keys: _Keys,
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """The largest weight of each key over ``rows``, which are at ``places`` in the prompt."""
    distance = places[:, None] - keys.places
    visible = (distance >= 0) & (keys.places < readers.before[rows, None]) & ~keys.is_hidden
    if rule.window:
        visible &= distance < rule.window
    q = rotate_wide(readers.q[rows].float(), places, rotation)
    scores = score(q, keys.rotated, distance, visible, rule)
    # a row without keys has an lse of -inf and only hidden keys here
    lse = readers.lse[rows].masked_fill(readers.lse[rows] == -torch.inf, 0.0)
    weights = (scores - lse[..., None]).exp() * readers.weight[rows, None, None]
    return weights.amax((0, 1)).float()
