"""The span list of prefill attention: tiles of new rows, each request with the spans that they may
read.

Same arrays-with-counts form as the decode work list, for the same reason: it replays as a CUDA
graph and blend fills it with rows that have gaps and keys that carry explicit positions."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class SpanList:
    """Tile ``t`` (of ``num_tiles[0]``) holds rows of one request; the request's spans are what they
    read.

    - ``tile_row_indptr[t] : tile_row_indptr[t + 1]``: the tile's rows, sorted by position
    - ``tile_request[t]``: the request ``u`` they belong to; ``row_positions`` are true positions
    - ``request_span_indptr[u] : request_span_indptr[u + 1]``: its spans

    Span ``s``:

    - pages ``span_page_indptr[s] : span_page_indptr[s + 1]`` into ``page_indices``; the n-th page
      of a span holds frame positions from ``n * page_size``
    - ``span_offset[s]``: Δ; a key at frame position ``p`` truly stands at ``Δ + p``
    - ``span_length[s]``: how many keys (slots, for an explicit span) the span has, no more than
      its pages have slots
    - ``span_explicit[s]``: 1 if frame positions are read from ``slot_positions`` (a patch), else 0
    - ``span_mask[s]``: -1, or the word of ``mask_words`` where a bitmap over frame positions
      begins; a set bit hides the key from this request

    - ``row_patch_bounds``: of how many leading slots of the explicit span of its request each row
      stands at the position or behind; None where a request may have more than one such span, or
      its slots are not sorted by position

    Where there are few tiles, a kernel may read the keys of each in so many ``parts`` at a time. In
    a ``complete`` list every row is in a tile, so that nothing need be cleared for the others.

    With ``source_slots`` and ``source_turns``, as in `looseleaf.ops.gather_kv.KeySources`, the
    pages of the list are those of `GATHERED_SIZE` slots into which these are gathered first.

    A list that the kernel of the Hopper generation reads tells it its units
    (`looseleaf.ops.prefill_attention.units`): ``num_units[0]`` of them, eight ``unit_numbers``
    each, the longest first. If some tiles are cut, units leave ``num_states`` states at most, of
    which row ``r`` has those from ``row_state_indptr[r]`` on; 0 if each row has one, its answer.
    Each of its programs has so many computing ``groups``, of 64 packed rows of a tile each."""

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


def require_room(span: int, length: int, slots: int) -> None:
    """Raises InvalidOption if ``length`` keys of a span are more than its pages have ``slots``."""
    if length > slots:
        raise InvalidOption(
            f"span {span} has {length} keys, and pages of {slots} slots: list its other pages, or "
            "lower span_length"
        )
