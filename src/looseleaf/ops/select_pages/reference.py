"""Selection of pages, row by row and head by head."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages, SeenPages


def select_pages_reference(
    scores: Float[Tensor, "rows kv_heads most"],
    candidates: CandidateList,
    into: ChosenPages,
    seen: SeenPages | None,
) -> None:
    """See `looseleaf.ops.select_pages`."""
    for row in range(int(candidates.num_rows[0])):
        for head in range(scores.shape[1]):
            count, limit = int(candidates.num_pages[row]), int(candidates.limit[row])
            mine = scores[row, head, :count]
            best = mine.argsort(descending=True, stable=True)[:limit]
            taken = torch.zeros(count, dtype=torch.bool, device=scores.device)
            taken[best[mine[best] > -torch.inf]] = True
            place = row * scores.shape[1] + head
            if seen is not None:
                taken[count - int(seen.newly_sealed[row]) :] = True
            chosen = taken.nonzero()[:, 0]
            spans = candidates.spans[row, chosen]
            if seen is not None:
                _mark(row, head, taken, candidates, into, seen)
            pages = torch.stack([candidates.pages[row, chosen], candidates.starts[row, chosen]])
            _write_items(row, place, pages, spans, candidates, into)


def _mark(
    row: int,
    head: int,
    taken: Bool[Tensor, " candidates"],
    candidates: CandidateList,
    into: ChosenPages,
    seen: SeenPages,
) -> None:
    """Mark what the row takes as read, unless it is marked already."""
    slot, work = int(seen.slot[row]), into.work
    position = int(work.row_positions[candidates.row[row].long()])
    register = seen.registers[slot, head, : len(taken)]
    first = (row * seen.booked.shape[1] + head) * into.room
    chosen = seen.chosen[first : first + int(taken.sum())]
    if int(seen.booked[slot, head]) == position:
        chosen.fill_(255)
        return
    seen.booked[slot, head] = position
    chosen.copy_(register[taken])
    register.copy_((register << 1) | taken.to(torch.uint8))


def _write_items(
    row: int,
    place: int,
    pages: Int[Tensor, "2 chosen"],
    spans: Int[Tensor, " chosen"],
    candidates: CandidateList,
    into: ChosenPages,
) -> None:
    """The items of a place: pages with the positions of their first slots, of spans of ``row``."""
    work, first, count = into.work, place * into.room, pages.shape[1]
    work.page_indices[first : first + count] = pages[0]
    work.page_positions[first : first + count] = pages[1]
    num_spans = candidates.span_offset.shape[1]
    each = max(-(-count // into.num_parts), into.least_pages)
    parts = [min(n * each, count) for n in range(into.num_parts)]
    cuts = sorted([*parts, *(int((spans < span).sum()) for span in range(1, num_spans))])
    item, entry = place * (into.num_items + 1), place * into.num_items * into.window
    for n, cut in enumerate(cuts):
        # a piece without pages belongs to any span
        span = int(spans[cut]) if cut < count else num_spans - 1
        work.item_page_indptr[item + n] = first + cut
        mine = slice(entry + n * into.window, entry + (n + 1) * into.window)
        work.entry_offset[mine] = candidates.span_offset[row, span]
        work.entry_bound[mine] = candidates.span_bound[row, span]
        work.entry_mask[mine] = candidates.span_mask[row, span]
    work.item_page_indptr[item + into.num_items] = first + count
