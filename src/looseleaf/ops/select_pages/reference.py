"""Selection of pages, row by row and head by head."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages


def select_pages_reference(
    scores: Float[Tensor, "rows kv_heads most"], candidates: CandidateList, into: ChosenPages
) -> None:
    """See `looseleaf.ops.select_pages`."""
    for row in range(int(candidates.num_rows[0])):
        for head in range(scores.shape[1]):
            count, limit = int(candidates.num_pages[row]), int(candidates.limit[row])
            mine = scores[row, head, :count]
            best = mine.argsort(descending=True, stable=True)[:limit]
            chosen = best[mine[best] > -torch.inf].sort().values
            _write(row, row * scores.shape[1] + head, chosen, candidates, into)


def _write(
    row: int, place: int, chosen: Tensor, candidates: CandidateList, into: ChosenPages
) -> None:
    work, first, count = into.work, place * into.room, len(chosen)
    work.page_indices[first : first + count] = candidates.pages[row, chosen]
    work.page_positions[first : first + count] = candidates.starts[row, chosen]
    spans = candidates.spans[row, chosen]
    num_spans = candidates.span_offset.shape[1]
    parts = [min(n * into.pages_per_part, count) for n in range(into.num_parts)]
    cuts = sorted([*parts, *(int((spans < span).sum()) for span in range(1, num_spans))])
    item, entry = place * (into.num_items + 1), place * into.num_items
    for n, cut in enumerate(cuts):
        # a piece without pages belongs to any span
        span = int(spans[cut]) if cut < count else num_spans - 1
        work.item_page_indptr[item + n] = first + cut
        work.entry_offset[entry + n] = candidates.span_offset[row, span]
        work.entry_bound[entry + n] = candidates.span_bound[row, span]
        work.entry_mask[entry + n] = candidates.span_mask[row, span]
    work.item_page_indptr[item + into.num_items] = first + count
