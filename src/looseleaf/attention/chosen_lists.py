"""A work list in which rows choose their pages on the device, layer by layer.

What rows read in any case is planned on the host as ever. In front of it stand items without pages
for what they choose: `select_pages` fills them anew in every layer, so that one launch reads both
and a step has no host work between its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.lists import HostWork, IntArray, indptr_of, int32
from looseleaf.attention.readings import SelectedRows
from looseleaf.attention.selection import Candidates
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_scores import page_scores
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.select_pages import CandidateList, ChosenPages, select_pages

# an item is one row's; of three pipeline stages each read was twice as slow as of two
CHOSEN_TILE = Tile(16, 64, 4, 2, 2, chosen=True)
# parts of chosen pages for all rows and heads together: about two programs a processor of a GPU
_PARTS = 264


@runtime_checkable
class ByVectors(Protocol):
    """A policy that may be a plain one: the largest products of a query head and what is kept of a
    page, with so many pages of the sink and recent ones; None if it is not."""

    @property
    def vector_budget(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class ChosenShape:
    """How many rows choose, for how many KV heads, of how many spans at most; ``room`` pages for
    each row and head, cut in ``num_parts``."""

    rows: int
    kv_heads: int
    most_spans: int
    room: int

    @property
    def num_parts(self) -> int:
        return max(1, min(self.room, _PARTS // (self.rows * self.kv_heads)))

    @property
    def pages_per_part(self) -> int:
        return -(-self.room // self.num_parts)

    @property
    def num_items(self) -> int:
        """Items of a row and head that have entries; one more takes the room left over."""
        return self.num_parts + self.most_spans - 1

    def into(self, work: WorkList) -> ChosenPages:
        """Where `select_pages` writes in a list that `with_room` made."""
        return ChosenPages(work, self.room, self.num_parts, self.pages_per_part, self.num_items)


def with_room(work: HostWork, rows: Sequence[int], shape: ChosenShape) -> HostWork:
    """``work`` with items in front of it for what ``rows`` choose; places past them are empty."""
    places, used = shape.rows * shape.kv_heads, len(rows) * shape.kv_heads
    num, entries = shape.num_items, used * shape.num_items
    old = work.arrays
    counts = np.diff(old["row_state_indptr"])
    more = counts.copy()
    more[list(rows)] += num
    states = indptr_of(more)
    shift = states[:-1] - old["row_state_indptr"][:-1]
    row = np.repeat(int32(rows), shape.kv_heads * num)
    nth = np.tile(np.arange(num, dtype=np.int32), used)
    place = np.arange(places, dtype=np.int32)
    item_entries = np.minimum(
        (place[:, None] * num + np.arange(num + 1, dtype=np.int32)).reshape(-1), entries
    )
    item_pages = np.repeat(place, num + 1) * shape.room
    heads = np.repeat(place % shape.kv_heads, num + 1)

    def joined(name: str, first: IntArray) -> IntArray:
        return np.concatenate([first, old[name]]).astype(np.int32)

    arrays = {
        **old,
        "num_items": old["num_items"] + len(heads),
        "item_page_indptr": np.concatenate(
            [item_pages, old["item_page_indptr"] + places * shape.room]
        ).astype(np.int32),
        "item_entry_indptr": np.concatenate(
            [item_entries, old["item_entry_indptr"] + entries]
        ).astype(np.int32),
        "item_kv_head": joined("item_kv_head", heads),
        "item_explicit": joined("item_explicit", np.zeros_like(heads)),
        "page_indices": joined("page_indices", np.zeros(places * shape.room, np.int32)),
        "page_positions": joined("page_positions", np.zeros(places * shape.room, np.int32)),
        "entry_row": joined("entry_row", row),
        "entry_offset": joined("entry_offset", np.zeros_like(row)),
        "entry_bound": joined("entry_bound", np.zeros_like(row)),
        "entry_mask": joined("entry_mask", np.full_like(row, -1)),
        "entry_state": np.concatenate(
            [states[row] + counts[row] + nth, old["entry_state"] + shift[old["entry_row"]]]
        ).astype(np.int32),
        "row_state_indptr": states,
        "tile_indptr": np.concatenate([[0], old["tile_indptr"] + len(heads)]).astype(np.int32),
    }
    return HostWork(arrays, (CHOSEN_TILE, *work.tiles))


def candidate_list(candidates: Candidates, places: Tensor, sink: int, recent: int) -> CandidateList:
    """The candidates of rows at ``places`` of the step, as the operators take them."""
    table = candidates.table
    size = candidates.pool.page_size
    num_rows, most = len(candidates.rows), table.most_spans
    first = table.spans[:, :1]
    index = (first + torch.arange(most, device=first.device)).clamp_max(len(table.span_row) - 1)
    others = torch.tensor([row.num_other(size) for row in candidates.rows]).to(first.device)
    first_recent = table.num_pages - (recent - others).clamp_min(0)

    def narrow(values: Tensor) -> Tensor:
        return values.to(torch.int32).contiguous()

    return CandidateList(
        num_rows=torch.tensor([num_rows], dtype=torch.int32).to(first.device),
        row=narrow(places),
        num_pages=narrow(table.num_pages),
        limit=narrow(table.limits),
        first_recent=narrow(first_recent),
        pages=narrow(table.pages),
        starts=narrow(table.starts),
        spans=narrow(table.spans - first),
        span_offset=narrow(table.span_offset[index]),
        span_bound=narrow(table.span_bound[index]),
        span_mask=narrow(table.span_mask[index]),
        sink=sink,
    )


def joined_masks(
    work: HostWork, candidates: CandidateList, words: Tensor
) -> tuple[HostWork, CandidateList]:
    """Both with the bitmaps of candidates behind those of ``work``."""
    if not len(words):
        return work, candidates
    before = work.num_mask_words
    both = np.concatenate([work.arrays["mask_words"], words.cpu().numpy()]).astype(np.int32)
    mask = candidates.span_mask
    shifted = torch.where(mask >= 0, mask + before, mask)
    work = HostWork({**work.arrays, "mask_words": both}, work.tiles)
    return work, replace(candidates, span_mask=shifted)


@dataclass(frozen=True)
class DeviceChoice:
    """What fills the items of a list in every layer."""

    selected: SelectedRows
    listed: CandidateList
    into: ChosenPages

    def fill(self, layer: int, q: Tensor, implementation: Implementation) -> None:
        """Choose for ``layer``, whose unrotated queries are ``q``."""
        candidates, work = self.selected.candidates, self.into.work
        assert candidates.summaries is not None, "pages are scored by what is kept of them"
        vectors = candidates.summaries.layer(layer)
        how = candidates.rotation, candidates.rules[layer], candidates.pool.page_size
        positions = work.row_positions
        scores = page_scores(q, vectors, self.listed, positions, how, implementation)
        select_pages(scores, self.listed, self.into, implementation)
        self.selected.count(candidates.table.limits * candidates.num_kv_heads)


def chosen_on_device(selected: Sequence[SelectedRows]) -> SelectedRows | None:
    """The rows that choose, if all of them do so by the largest products, under one policy."""
    if len(selected) != 1 or not isinstance(selected[0].policy, ByVectors):
        return None
    measured = any(row.measured for row in selected[0].candidates.rows)
    plain = selected[0].policy.vector_budget is not None
    return selected[0] if plain and not measured else None


def choose_on_device(
    work: HostWork, selected: SelectedRows, device: torch.device
) -> tuple[WorkList, DeviceChoice]:
    """``work`` on the device with room for what is chosen, and what fills it."""
    policy, table = selected.policy, selected.candidates.table
    assert isinstance(policy, ByVectors) and policy.vector_budget is not None
    heads, rows = selected.candidates.num_kv_heads, len(selected.places)
    shape = ChosenShape(rows, heads, table.most_spans, table.most_chosen)
    listed = candidate_list(selected.candidates, selected.rows, *policy.vector_budget)
    work, listed = joined_masks(with_room(work, selected.places, shape), listed, table.mask_words)
    on_device = work.to(device)
    return on_device, DeviceChoice(selected, listed, shape.into(on_device))
