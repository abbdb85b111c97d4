"""Random candidate pages of rows, and empty lists for the selected ones."""

import torch
from torch import Tensor

from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.select_pages import CandidateList, ChosenPages, SeenPages

NUM_KV_HEADS = 2
# the value of unwritten list entries
UNWRITTEN = -7


def candidate_list(
    seed: int,
    rows: int,
    max_pages: int,
    most_spans: int = 3,
    device: str = "cpu",
    num_pages: int = 64,
) -> CandidateList:
    """``rows`` rows, the last one unused, with up to ``max_pages`` candidates each."""
    generator = torch.Generator().manual_seed(seed)

    def random_int32(low: int, high: int, *size: int) -> Tensor:
        numbers = torch.randint(low, high, size, generator=generator, dtype=torch.int32)
        return numbers.to(device)

    num_pages_of_row = random_int32(1, max_pages + 1, rows)
    num_pages_of_row[0] = max_pages
    spans = random_int32(0, most_spans, rows, max_pages).sort(1).values.to(torch.int32)
    first_in_span = torch.searchsorted(spans, torch.arange(most_spans).to(spans).repeat(rows, 1))
    column = torch.arange(max_pages, device=device)
    starts = (column - first_in_span.gather(1, spans.long())) * 16
    lengths = torch.full((rows, most_spans), 16 * max_pages, dtype=torch.int32, device=device)
    return CandidateList(
        num_rows=torch.tensor([max(1, rows - 1)], dtype=torch.int32, device=device),
        row=torch.arange(rows, dtype=torch.int32, device=device).flip(0).contiguous(),
        num_pages=num_pages_of_row,
        limit=torch.minimum(random_int32(1, max_pages + 1, rows), num_pages_of_row),
        first_recent=num_pages_of_row - 1,
        pages=random_int32(0, num_pages, rows, max_pages),
        starts=starts.to(torch.int32),
        spans=spans,
        span_offset=random_int32(0, 100, rows, most_spans),
        span_bound=lengths,
        span_mask=random_int32(-1, 5, rows, most_spans),
        sink=1,
    )


def room_for(candidates: CandidateList, room: int, num_parts: int, window: int = 1) -> ChosenPages:
    """Unwritten lists with room for ``room`` pages per row and KV head."""
    rows, most_spans = candidates.span_offset.shape
    num_items = num_parts + most_spans - 1
    lists, device = rows * NUM_KV_HEADS, candidates.pages.device

    def unwritten(length: int) -> Tensor:
        return torch.full((length,), UNWRITTEN, dtype=torch.int32, device=device)

    entries = lists * num_items * window
    items = lists * (num_items + 1)
    work = WorkList(
        num_items=unwritten(1),
        item_page_indptr=unwritten(items + 1),
        item_entry_indptr=unwritten(items + 1),
        item_kv_head=unwritten(items),
        item_explicit=unwritten(items),
        page_indices=unwritten(lists * room),
        page_positions=unwritten(lists * room),
        mask_words=unwritten(0),
        row_positions=unwritten(rows),
        row_state_indptr=unwritten(rows + 1),
        entry_row=unwritten(entries),
        entry_offset=unwritten(entries),
        entry_bound=unwritten(entries),
        entry_mask=unwritten(entries),
        entry_state=unwritten(entries),
    )
    return ChosenPages(work, room, num_parts, num_items, 2, window)


def room_for_windows(
    candidates: CandidateList, room: int, num_parts: int, window: int
) -> tuple[ChosenPages, SeenPages]:
    """Lists with room for rows and ``window - 1`` earlier ones of each, and random sets of seen
    pages. The last row's set is not updated."""
    chosen_pages = room_for(candidates, room, num_parts, window)
    generator = torch.Generator().manual_seed(0)
    rows, max_pages = candidates.pages.shape
    device = candidates.pages.device
    sizes = rows, NUM_KV_HEADS
    # few bits are set, so that each row has new pages
    registers = torch.randint(0, 256, (*sizes, max_pages), generator=generator)
    registers &= torch.randint(0, 256, (*sizes, max_pages), generator=generator)
    chosen_pages.work.row_positions.copy_(torch.arange(100, 100 + rows))
    reserved_positions = torch.full(sizes, 7)
    slot = torch.arange(rows, dtype=torch.int32).roll(1)
    reserved_positions[slot[0].long()] = int(
        chosen_pages.work.row_positions[candidates.row[0].long()]
    )
    chosen_buffer = torch.full((rows * NUM_KV_HEADS * room,), UNWRITTEN, dtype=torch.int32)
    sealed = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32)
    tensors = registers.to(torch.uint8), reserved_positions, slot, sealed, chosen_buffer
    return chosen_pages, SeenPages(*(tensor.to(device) for tensor in tensors))
