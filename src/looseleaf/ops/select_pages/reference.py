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
            row_scores = scores[row, head, :count]
            best = row_scores.argsort(descending=True, stable=True)[:limit]
            selected = torch.zeros(count, dtype=torch.bool, device=scores.device)
            selected[best[row_scores[best] > -torch.inf]] = True
            pair = row * scores.shape[1] + head
            if seen is not None:
                selected[count - int(seen.newly_sealed[row]) :] = True
            chosen = selected.nonzero()[:, 0]
            spans = candidates.spans[row, chosen]
            if seen is not None:
                _mark(row, head, selected, candidates, into, seen)
            pages = torch.stack([candidates.pages[row, chosen], candidates.starts[row, chosen]])
            _write_items(row, pair, pages, spans, candidates, into)


def _mark(
    row: int,
    head: int,
    selected: Bool[Tensor, " candidates"],
    candidates: CandidateList,
    into: ChosenPages,
    seen: SeenPages,
) -> None:
    """Adds the selected pages to the read history, unless the step is a repetition."""
    slot, work = int(seen.slot[row]), into.work
    position = int(work.row_positions[candidates.row[row].long()])
    register = seen.registers[slot, head, : len(selected)]
    first = (row * seen.booked.shape[1] + head) * into.room
    chosen = seen.chosen[first : first + int(selected.sum())]
    if int(seen.booked[slot, head]) == position:
        chosen.fill_(255)
        return
    seen.booked[slot, head] = position
    chosen.copy_(register[selected])
    register.copy_((register << 1) | selected.to(torch.uint8))


def _write_items(
    row: int,
    pair: int,
    pages: Int[Tensor, "2 chosen"],
    spans: Int[Tensor, " chosen"],
    candidates: CandidateList,
    into: ChosenPages,
) -> None:
    """Writes the items of a pair: ``pages`` holds page numbers and positions of first slots."""
    work, first, count = into.work, pair * into.room, pages.shape[1]
    work.page_indices[first : first + count] = pages[0]
    work.page_positions[first : first + count] = pages[1]
    num_spans = candidates.span_offset.shape[1]
    part_pages = max(-(-count // into.num_parts), into.least_pages)
    parts = [min(n * part_pages, count) for n in range(into.num_parts)]
    cuts = sorted([*parts, *(int((spans < span).sum()) for span in range(1, num_spans))])
    item, entry = pair * (into.num_items + 1), pair * into.num_items * into.window
    for n, cut in enumerate(cuts):
        # a part without pages may belong to any span
        span = int(spans[cut]) if cut < count else num_spans - 1
        work.item_page_indptr[item + n] = first + cut
        entries = slice(entry + n * into.window, entry + (n + 1) * into.window)
        work.entry_offset[entries] = candidates.span_offset[row, span]
        work.entry_bound[entries] = candidates.span_bound[row, span]
        work.entry_mask[entries] = candidates.span_mask[row, span]
    work.item_page_indptr[item + into.num_items] = first + count
