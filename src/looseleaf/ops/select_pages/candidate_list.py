"""The candidates of some rows, and where what is chosen of them goes: plain int32 tensors of fixed
capacity, so that a step replays as a CUDA graph."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.partial_attention.work_list import WorkList


@dataclass(frozen=True)
class CandidateList:
    """Row ``r`` (of ``num_rows[0]``) is row ``row[r]`` of the queries and chooses at most
    ``limit[r]`` of its ``num_pages[r]`` candidates for each KV head.

    Candidate ``i`` is page ``pages[r, i]``, whose first slot stands at ``starts[r, i]`` in the
    frame of the row's span ``spans[r, i]``; spans rise. Span ``s`` has its offset Δ, the frame
    position before which keys stand, and where its bitmap begins (or -1): ``span_offset``,
    ``span_bound``, ``span_mask`` ``[r, s]``. The first ``sink`` candidates and those from
    ``first_recent[r]`` on are chosen before others.
    """

    num_rows: Int[Tensor, "1"]
    row: Int[Tensor, " rows"]
    num_pages: Int[Tensor, " rows"]
    limit: Int[Tensor, " rows"]
    first_recent: Int[Tensor, " rows"]
    pages: Int[Tensor, "rows most"]
    starts: Int[Tensor, "rows most"]
    spans: Int[Tensor, "rows most"]
    span_offset: Int[Tensor, "rows most_spans"]
    span_bound: Int[Tensor, "rows most_spans"]
    span_mask: Int[Tensor, "rows most_spans"]
    sink: int = 0


@dataclass(frozen=True)
class ChosenPages:
    """The first items, entries and pages of a work list, which hold what rows choose.

    Row ``r`` and KV head ``h`` have ``room`` pages from ``(r * kv_heads + h) * room`` on, in
    ``num_items`` items with one entry each and one more without, which takes the room left over:
    from item ``(r * kv_heads + h) * (num_items + 1)`` and entry ``(r * kv_heads + h) * num_items``
    on. The chosen pages are cut where a span begins, and after every ``pages_per_part``;
    ``num_items`` is ``num_parts`` plus spans of a row less one. What the operator does not write is
    written already: rows, states and KV heads of items and entries.
    """

    work: WorkList
    room: int
    num_parts: int
    pages_per_part: int
    num_items: int
