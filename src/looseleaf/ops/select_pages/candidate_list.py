"""Candidate pages of rows, and the destination of the selection.

Plain int32 tensors of fixed capacity, so that a step replays as a CUDA graph."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor

from looseleaf.ops.partial_attention.work_list import WorkList


@dataclass(frozen=True)
class CandidateList:
    """Candidates of rows: row ``r`` of ``num_rows[0]`` selects pages for query row ``row[r]``.

    For each KV head it selects at most ``limit[r]`` of its ``num_pages[r]`` candidates. Candidate
    ``i`` is page ``pages[r, i]`` of span ``spans[r, i]``; ``starts[r, i]`` is the frame position of
    its first slot. Spans rise. Span ``s`` has the offset Δ ``span_offset[r, s]``, the bound
    ``span_bound[r, s]`` on frame positions, and the first word of its bitmap ``span_mask[r, s]``
    (or -1). The first ``sink`` candidates and those from ``first_recent[r]`` on are always selected
    first."""

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
    """fp32 scores of candidates per row and KV head, and maxima of runs of candidates.

    ``each`` is undefined after a row's last candidate. ``maxima`` are over ``run`` consecutive
    candidates, -inf without a candidate."""

    each: Float[Tensor, "rows kv_heads most"]
    maxima: Float[Tensor, "rows kv_heads runs"]
    run: int

    @classmethod
    def of(
        cls, each: Float[Tensor, "rows kv_heads most"], candidates: CandidateList, run: int
    ) -> "PageScores":
        """Scores with their maxima."""
        num_candidates = each.shape[2]
        exists = torch.arange(num_candidates, device=each.device) < candidates.num_pages[:, None]
        masked = each.masked_fill(~exists[:, None], -torch.inf)
        padded = torch.nn.functional.pad(masked, (0, -num_candidates % run), value=-torch.inf)
        return cls(each, padded.unflatten(2, (-1, run)).amax(3), run)


def best_run(most: int, room: int) -> int:
    """Length of runs for the selection of ``room`` of ``most`` pages.

    It minimises the number of maxima plus the pages in the selected runs, up to twice ``room``."""
    lengths = [run for run in (1, 2, 4, 8, 16, 32) if run == 1 or 2 * room * run < most]
    # ties: the longest run, which has the fewest maxima, or no runs
    return min(
        lengths,
        key=lambda run: (most, 0.0) if run == 1 else (most // run + 2 * room * run, 1 / run),
    )


@dataclass(frozen=True)
class ChosenPages:
    """Items, entries and pages of a work list that hold the selection.

    Pair ``p = r * kv_heads + h`` of row ``r`` and KV head ``h`` owns ``room`` pages from ``p *
    room`` on. It owns ``num_items`` items with ``window`` entries each, and one item without
    entries for unused room. Its first item is ``p * (num_items + 1)``, its first entry ``p *
    num_items * window``. The first entry of an item is the selecting row, the others are earlier
    rows that read the same pages.

    The selected pages are cut at borders of spans and into ``num_parts`` equal parts of at least
    ``least_pages`` pages; ``num_items`` is ``num_parts`` plus the spans of a row minus one. Rows,
    states and KV heads of items and entries are constant and not written."""

    work: WorkList
    room: int
    num_parts: int
    num_items: int
    least_pages: int = 1
    window: int = 1


@dataclass(frozen=True)
class SeenPages:
    """Read history of pages in one layer, for rows that are revised.

    Bit ``j`` of ``registers[slot[r], h, i]`` is set if candidate ``i`` of row ``r`` was read ``j +
    1`` steps ago. The last ``newly_sealed[r]`` candidates, at most 16, are always selected, beyond
    the limit. ``booked[slot[r], h]`` is the position of the last row in the history. If it equals
    the row's own position, the step is a repetition and the history stays. ``chosen`` receives the
    registers of the selected pages before this step, as ``page_seen`` of a work list; 255 in a
    repetition."""

    registers: UInt8[Tensor, "slots kv_heads pages"]
    booked: Int64[Tensor, "slots kv_heads"]
    slot: Int[Tensor, " rows"]
    newly_sealed: Int[Tensor, " rows"]
    chosen: Int[Tensor, " places_times_room"]
