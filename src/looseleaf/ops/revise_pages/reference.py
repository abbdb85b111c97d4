"""Pages that are new to earlier rows, row by row and head by head."""

import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages, SeenPages
from looseleaf.ops.select_pages.reference import write_items


def revise_pages_reference(
    candidates: CandidateList,
    newest: ChosenPages,
    past: ChosenPages,
    seen: SeenPages,
    rows: Int[Tensor, " places"],
) -> None:
    """See `looseleaf.ops.revise_pages`."""
    work, heads = newest.work, seen.booked.shape[1]
    each = len(rows) // len(candidates.row)
    for index, number in enumerate(rows.tolist()):
        row, age = index // each, index % each + 1
        if number < 0 or row >= int(candidates.num_rows[0]):
            continue
        for head in range(heads):
            place = row * heads + head
            item = newest.first_item + place * (newest.num_items + 1)
            first = int(work.item_page_indptr[item])
            stop = int(work.item_page_indptr[item + newest.num_items])
            new = seen.chosen[first:stop] & ((1 << age) - 1) == 0
            pages = torch.stack([work.page_indices[first:stop], work.page_positions[first:stop]])
            spans = seen.chosen_spans[first:stop][new]
            write_items(row, index * heads + head, pages[:, new], spans, candidates, past)
