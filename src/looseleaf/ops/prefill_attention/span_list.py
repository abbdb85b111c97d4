"""The span list of prefill attention: tiles of new rows, and the spans that each request reads.

Arrays of fixed capacity with counts, as in the decode work list, replay in a CUDA graph. Blending
adds rows with gaps and keys with explicit positions."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class SpanList:
    """Tile ``t`` of ``num_tiles[0]`` has rows of one request, which read that request's spans.

    - ``tile_row_indptr[t] : tile_row_indptr[t + 1]``: the tile's rows, sorted by position
    - ``tile_request[t]``: their request ``u``; ``row_positions`` are true positions
    - ``request_span_indptr[u] : request_span_indptr[u + 1]``: its spans

    Span ``s``:

    - pages ``span_page_indptr[s] : span_page_indptr[s + 1]`` of ``page_indices``; page ``n`` of a
      span starts at frame position ``n * page_size``
    - ``span_offset[s]``: Δ; a key at frame position ``p`` has the true position ``Δ + p``
    - ``span_length[s]``: number of keys (of slots, for an explicit span), at most the slots of its
      pages
    - ``span_explicit[s]``: 1 if frame positions are read from ``slot_positions`` (a patch), else 0
    - ``span_mask[s]``: first word in ``mask_words`` of a bitmap over frame positions, or -1; a set
      bit hides the key from this request

    Options:

    - ``row_patch_bounds``: per row, the leading slots of its request's explicit span at its
      position or before. None if a request may have several such spans, or unsorted slots.
    - ``parts``: few tiles are read by several programs each, which split the keys.
    - ``complete``: every row is in a tile, so that outputs need no initialisation.
    - ``source_slots`` and ``source_turns`` (`looseleaf.ops.gather_kv.KeySources`): keys are
      gathered first, into the list's pages of `GATHERED_SIZE` slots.
    - ``value_start``: the number of rotated dims if all values are 0 in them, as with keys expanded
      from latents, else 0. Kernels skip the products of these dims.

    A list for the Hopper kernel has units (`looseleaf.ops.prefill_attention.units`):
    ``num_units[0]`` of them with eight ``unit_numbers`` each, the longest first. If tiles are cut,
    units leave at most ``num_states`` states, and row ``r`` owns those from ``row_state_indptr[r]``
    on. Otherwise ``num_states`` is 0, and a row's only state is final. Each program has ``groups``
    consumer warpgroups of 64 packed rows."""

    num_tiles: Int[Tensor, "1"]
    tile_row_indptr: Int[Tensor, " tiles_plus_one"]
    tile_request: Int[Tensor, " tiles"]
    request_span_indptr: Int[Tensor, " requests_plus_one"]
    span_page_indptr: Int[Tensor, " spans_plus_one"]
    span_offset: Int[Tensor, " spans"]
    span_length: Int[Tensor, " spans"]
    span_explicit: Int[Tensor, " spans"]
    span_mask: Int[Tensor, " spans"]
    page_indices: Int[Tensor, " page_capacity"]
    mask_words: Int[Tensor, " words"]
    row_positions: Int[Tensor, " rows"]
    parts: int = 1
    row_patch_bounds: Int[Tensor, " rows"] | None = None
    complete: bool = False
    num_units: Int[Tensor, "1"] | None = None
    unit_numbers: Int[Tensor, " eight_a_unit"] | None = None
    row_state_indptr: Int[Tensor, " rows_plus_one"] | None = None
    num_states: int = 0
    groups: int = 2
    source_slots: Int[Tensor, " keys"] | None = None
    source_turns: Int[Tensor, " keys"] | None = None
    value_start: int = 0


def require_room(span: int, length: int, slots: int) -> None:
    """Raises InvalidOption if a span has more keys (``length``) than its pages have ``slots``."""
    if length > slots:
        raise InvalidOption(
            f"span {span} has {length} keys, but its pages have {slots} slots: list all its pages, "
            "or lower span_length"
        )
