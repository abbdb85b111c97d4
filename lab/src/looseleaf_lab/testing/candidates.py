"""Random candidates of rows, and an empty list for what is chosen of them."""

import torch
from torch import Tensor

from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.select_pages import CandidateList, ChosenPages, SeenPages

NUM_KV_HEADS = 2
# what stands in a list where nothing was written
UNWRITTEN = -7


def candidate_list(
    seed: int, rows: int, most: int, most_spans: int = 3, device: str = "cpu", num_pages: int = 64
) -> CandidateList:
    """``rows`` rows, of which the last is unused, with up to ``most`` candidates each."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *size: int) -> Tensor:
        numbers = torch.randint(low, high, size, generator=generator, dtype=torch.int32)
        return numbers.to(device)

    num = drawn(1, most + 1, rows)
    num[0] = most
    spans = drawn(0, most_spans, rows, most).sort(1).values.to(torch.int32)
    first = torch.searchsorted(spans, torch.arange(most_spans).to(spans).repeat(rows, 1))
    column = torch.arange(most, device=device)
    starts = (column - first.gather(1, spans.long())) * 16
    lengths = torch.full((rows, most_spans), 16 * most, dtype=torch.int32, device=device)
    return CandidateList(
        num_rows=torch.tensor([max(1, rows - 1)], dtype=torch.int32, device=device),
        row=torch.arange(rows, dtype=torch.int32, device=device).flip(0).contiguous(),
        num_pages=num,
        limit=torch.minimum(drawn(1, most + 1, rows), num),
        first_recent=num - 1,
        pages=drawn(0, num_pages, rows, most),
        starts=starts.to(torch.int32),
        spans=spans,
        span_offset=drawn(0, 100, rows, most_spans),
        span_bound=lengths,
        span_mask=drawn(-1, 5, rows, most_spans),
        sink=1,
    )


def room_for(candidates: CandidateList, room: int, num_parts: int, window: int = 1) -> ChosenPages:
    """Lists with room for ``room`` pages a row and KV head, everything in them still to write."""
    rows, most_spans = candidates.span_offset.shape
    num_items = num_parts + most_spans - 1
    places, device = rows * NUM_KV_HEADS, candidates.pages.device

    def unwritten(length: int) -> Tensor:
        return torch.full((length,), UNWRITTEN, dtype=torch.int32, device=device)

    entries = places * num_items * window
    items = places * (num_items + 1)
    work = WorkList(
        num_items=unwritten(1),
        item_page_indptr=unwritten(items + 1),
        item_entry_indptr=unwritten(items + 1),
        item_kv_head=unwritten(items),
        item_explicit=unwritten(items),
        page_indices=unwritten(places * room),
        page_positions=unwritten(places * room),
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
    """Lists with room for rows and ``window - 1`` earlier ones of each, and random seen-sets of
    them. Of the last row nothing is marked again."""
    into = room_for(candidates, room, num_parts, window)
    generator = torch.Generator().manual_seed(0)
    rows, most = candidates.pages.shape
    device = candidates.pages.device
    sizes = rows, NUM_KV_HEADS
    # few bits are set, so that some pages are new to each row
    registers = torch.randint(0, 256, (*sizes, most), generator=generator)
    registers &= torch.randint(0, 256, (*sizes, most), generator=generator)
    into.work.row_positions.copy_(torch.arange(100, 100 + rows))
    booked = torch.full(sizes, 7)
    slot = torch.arange(rows, dtype=torch.int32).roll(1)
    booked[slot[0].long()] = int(into.work.row_positions[candidates.row[0].long()])
    chosen = torch.full((rows * NUM_KV_HEADS * room,), UNWRITTEN, dtype=torch.int32)
    sealed = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32)
    tensors = registers.to(torch.uint8), booked, slot, sealed, chosen
    return into, SeenPages(*(tensor.to(device) for tensor in tensors))
