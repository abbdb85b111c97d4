"""The candidates of some rows, and where what is chosen of them goes: plain int32 tensors of fixed
capacity, so that a step replays as a CUDA graph."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64, UInt8
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


class PageScores(NamedTuple):
    """How much each KV head of a row wants ``each`` of its candidates, fp32: anything where it has
    none; and the largest of every ``run`` neighbours, -inf where there is none."""

    each: Float[Tensor, "rows kv_heads most"]
    maxima: Float[Tensor, "rows kv_heads runs"]
    run: int

    @classmethod
    def of(
        cls, each: Float[Tensor, "rows kv_heads most"], candidates: CandidateList, run: int
    ) -> "PageScores":
        """Scores with their maxima."""
        most = each.shape[2]
        exists = torch.arange(most, device=each.device) < candidates.num_pages[:, None]
        there = each.masked_fill(~exists[:, None], -torch.inf)
        padded = torch.nn.functional.pad(there, (0, -most % run), value=-torch.inf)
        return cls(each, padded.unflatten(2, (-1, run)).amax(3), run)


def best_run(most: int, room: int) -> int:
    """How long runs had better be for ``room`` of ``most`` pages to be chosen: so that maxima, and
    the pages of the runs that are chosen, up to twice as many, are few together."""
    lengths = [run for run in (1, 2, 4, 8, 16, 32) if run == 1 or 2 * room * run < most]
    # of equal ones the longest, which has the fewest maxima to look at, or no runs at all
    return min(
        lengths,
        key=lambda run: (most, 0.0) if run == 1 else (most // run + 2 * room * run, 1 / run),
    )


@dataclass(frozen=True)
class ChosenPages:
    """Items, entries and pages of a work list which hold what some rows choose.

    Place ``p`` (of row ``r`` and KV head ``h``: ``r * kv_heads + h``) has ``room`` pages from ``p *
    room`` on, in ``num_items`` items with ``window`` entries each and one more without, which takes
    the room left over: from item ``p * (num_items + 1)`` and entry ``p * num_items * window`` on.
    The first entry of an item is the row that chooses, the others are earlier rows that read with
    it. The chosen pages are cut where a span begins, and in
    ``num_parts`` of the same length, but of no less than ``least_pages``; ``num_items`` is
    ``num_parts`` plus spans of a row less one. What the operators do not write is written already:
    rows, states and KV heads of items and entries.
    """

    work: WorkList
    room: int
    num_parts: int
    num_items: int
    least_pages: int = 1
    window: int = 1


@dataclass(frozen=True)
class SeenPages:
    """What rows of earlier steps have read, if they are revised, in one layer.

    ``registers[slot[r], h, i]`` says of candidate ``i`` of row ``r`` in which of the last eight
    steps it was read: bit ``j`` for the ``j + 1``th last. The last ``newly_sealed[r]`` candidates,
    at most 16, are read whatever they score, on top of the limit. ``booked[slot[r], h]`` is the
    position of the last row that was marked: if it is the row's own, the step is made again, and
    nothing is marked.
    ``chosen`` gets the registers before this step of the chosen pages, as a work list has them in
    ``page_seen``: 255 if the step is made again.
    """

    registers: UInt8[Tensor, "slots kv_heads pages"]
    booked: Int64[Tensor, "slots kv_heads"]
    slot: Int[Tensor, " rows"]
    newly_sealed: Int[Tensor, " rows"]
    chosen: Int[Tensor, " places_times_room"]
