"""Work lists and span lists as host arrays, and their copy to a device.

The arrays are numpy; tensors are made for one step. For captured graphs
`looseleaf.attention.buffers.work_buffer` has tensors of fixed capacity."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from looseleaf.attention.plan.groups import Bitmap, DecodeRow, Item, join_bitmaps
from looseleaf.ops.partial_attention.unit_numbers import unit_numbers
from looseleaf.ops.partial_attention.work_list import Tile, WorkList

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
PageArray = Callable[[Sequence[int]], IntArray]
"""Pages as an array, cached between steps."""
OWN_NUMBERS = 4
"""Numbers a row in ``WorkList.row_own``."""
# Python adds up to this many numbers faster than numpy
_SHORT = 64
# kernels read fastest from multiples of 64 bytes
_ALIGNED = 16


def int32(values: Sequence[int] | IntArray) -> IntArray:
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=np.int32)
    return np.asarray(values, dtype=np.int32)


def indptr_of(counts: Sized) -> IntArray:
    """Prefix sums of ``counts``, with the leading 0."""
    if isinstance(counts, list) and len(counts) <= _SHORT:
        return np.array([0, *accumulate(counts)], dtype=np.int32)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(np.asarray(counts), out=indptr[1:])
    return indptr


def joined_masks(
    bitmaps: Sequence[Bitmap | None], explicit: IntArray
) -> tuple[list[int], IntArray]:
    """As `join_bitmaps`; with an ``explicit`` part there is at least one word, by which operators
    distinguish lists with patches from plain ones."""
    masks, words = join_bitmaps(bitmaps)
    return masks, int32([0]) if not len(words) and explicit.any() else words


def send(arrays: Mapping[str, IntArray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on ``device``, in one copy."""
    sizes = {name: len(array) for name, array in arrays.items()}
    flat = np.zeros(array_starts(sizes)[1], dtype=np.int32)
    host = torch.from_numpy(filled(flat, arrays, sizes))
    if device.type == "cuda":
        # a copy from pinned memory neither waits for kernels nor blocks the host
        host = host.pin_memory()
    return views(host.to(device, non_blocking=True), sizes)


def array_starts(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """The start of each array in one buffer, and the buffer's length."""
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name] = end
        end += -(-size // _ALIGNED) * _ALIGNED
    return starts, end


def filled(flat: IntArray, arrays: Mapping[str, IntArray], sizes: Mapping[str, int]) -> IntArray:
    """``flat`` with ``arrays`` written at the starts of `array_starts`."""
    starts, _ = array_starts(sizes)
    for name, array in arrays.items():
        flat[starts[name] : starts[name] + len(array)] = array
    return flat


def views(flat: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of the arrays in ``flat``, at the starts of `array_starts`."""
    starts, _ = array_starts(sizes)
    return {name: flat[starts[name] : starts[name] + size] for name, size in sizes.items()}


@dataclass(frozen=True)
class FlatItems:
    """Items in CSR form: the pages and the entries of all of them. No step writes keys of a
    ``final`` item while its rows read it."""

    pages: IntArray
    page_indptr: IntArray
    first_page: IntArray
    explicit: IntArray
    entries: IntArray  # [4, entries]: row, offset, bound, where its bitmap begins or -1
    entry_indptr: IntArray
    mask_words: IntArray
    final: IntArray

    @classmethod
    def create(
        cls, items: Sequence[Item], pages: Sequence[IntArray], *, final: bool = False
    ) -> "FlatItems":
        """``items``, whose pages are ``pages``."""
        entries = [entry for item in items for entry in item.entries]
        explicit = int32([item.explicit for item in items])
        masks, mask_words = joined_masks([entry.hidden for entry in entries], explicit)
        numbers = [(*entry[:3], mask) for entry, mask in zip(entries, masks, strict=True)]
        return cls(
            np.concatenate(pages) if pages else int32([]),
            indptr_of([len(p) for p in pages]),
            int32([item.first_page for item in items]),
            explicit,
            np.array(numbers, dtype=np.int32).reshape(-1, 4).T,
            indptr_of([len(item.entries) for item in items]),
            mask_words,
            np.full(len(items), int(final), np.int32),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["FlatItems"]) -> "FlatItems":
        """All items of all ``parts``."""
        entries = np.concatenate([p.entries for p in parts], axis=1)
        before = indptr_of([len(p.mask_words) for p in parts])[:-1]
        shift = np.repeat(before, [p.entries.shape[1] for p in parts])
        entries[3] += np.where(entries[3] >= 0, shift, 0)
        return cls(
            np.concatenate([p.pages for p in parts]),
            indptr_of(np.concatenate([np.diff(p.page_indptr) for p in parts])),
            np.concatenate([p.first_page for p in parts]),
            np.concatenate([p.explicit for p in parts]),
            entries,
            indptr_of(np.concatenate([np.diff(p.entry_indptr) for p in parts])),
            np.concatenate([p.mask_words for p in parts]),
            np.concatenate([p.final for p in parts]),
        )

    @property
    def num_pages(self) -> IntArray:
        return np.diff(self.page_indptr)

    @property
    def num_entries(self) -> IntArray:
        return np.diff(self.entry_indptr)


class Pieces(NamedTuple):
    """Items cut along keys and entries: the pages and entries of an item that each piece has."""

    item: IntArray
    first_page: IntArray
    stop_page: IntArray
    first_entry: IntArray
    stop_entry: IntArray

    @classmethod
    def whole(cls, flat: FlatItems) -> "Pieces":
        """One piece an item."""
        ones = np.ones(len(flat.first_page), dtype=np.int32)
        return cls.cut(flat, ones, ones)

    @classmethod
    def cut(cls, flat: FlatItems, page_parts: IntArray, entry_parts: IntArray) -> "Pieces":
        """Each item in near-equal parts; parts of the same keys are adjacent."""
        per_item = page_parts * entry_parts
        item = np.repeat(np.arange(len(per_item), dtype=np.int32), per_item)
        nth = ramp(per_item)
        parts, of_entries = page_parts[item], entry_parts[item]
        page_part, entry_part = nth // of_entries, nth % of_entries
        pages = flat.num_pages[item].astype(np.int64)
        entries = flat.num_entries[item].astype(np.int64)
        return cls(
            item,
            (pages * page_part // parts).astype(np.int32),
            (pages * (page_part + 1) // parts).astype(np.int32),
            (entries * entry_part // of_entries).astype(np.int32),
            (entries * (entry_part + 1) // of_entries).astype(np.int32),
        )

    def one_entry_a_row(self, flat: FlatItems, num_rows: int) -> bool:
        """Whether each of ``num_rows`` rows has one entry in one piece."""
        counts = self.stop_entry - self.first_entry
        if counts.sum() != num_rows:
            return False
        entries = np.repeat(flat.entry_indptr[self.item] + self.first_entry, counts) + ramp(counts)
        return len(np.unique(flat.entries[0, entries])) == num_rows

    def join(self, other: "Pieces") -> "Pieces":
        """These pieces, then those of ``other``."""
        return Pieces(*map(np.concatenate, zip(self, other, strict=True)))

    def take(self, order: IntArray) -> "Pieces":
        """The pieces in ``order``."""
        return Pieces(*(column[order] for column in self))


def ramp(counts: IntArray) -> IntArray:
    """0, 1, … for each count, concatenated."""
    indptr = indptr_of(counts)
    return np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[:-1], counts)


@dataclass(frozen=True)
class HostWork:
    """The arrays of a `WorkList` on the host; ``tiles`` as there. ``final`` as in `FlatItems`; None
    for no item."""

    arrays: dict[str, IntArray]
    tiles: tuple[Tile, ...] = ()
    final: IntArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.arrays["row_positions"])

    @property
    def num_items(self) -> int:
        return len(self.arrays["item_kv_head"])

    @property
    def num_entries(self) -> int:
        return len(self.arrays["entry_row"])

    @property
    def num_pages(self) -> int:
        return len(self.arrays["page_indices"])

    @property
    def num_mask_words(self) -> int:
        """0 if no row of the list has a patch."""
        return len(self.arrays["mask_words"])

    def to(self, device: torch.device) -> WorkList:
        """A work list of exactly these arrays."""
        numbers = unit_numbers(self.arrays, self.final) if device.type == "cuda" else {}
        return work_list(send({**self.arrays, **numbers}, device), self.tiles)


def work_list(tensors: dict[str, Tensor], tiles: tuple[Tile, ...]) -> WorkList:
    tensors = dict(tensors)
    indptr = tensors.pop("tile_indptr")
    return WorkList(**tensors, tile_indptr=indptr if tiles else None, tiles=tiles, complete=True)


def host_work(
    flat: FlatItems,
    pieces: Pieces,
    row_positions: IntArray,
    page_size: int,
    classes: Sequence[tuple[Tile, int]] = (),
) -> HostWork:
    """The arrays for ``pieces`` of ``flat``; ``classes`` are tiles and their numbers of pieces.

    A row's states are ordered by offset and position of their keys, independent of the grouping;
    those of a finishing tile follow all others."""
    finishing = sum(count for tile, count in classes if tile.finishing)
    pages = pieces.stop_page - pieces.first_page
    page_index = np.repeat(flat.page_indptr[pieces.item] + pieces.first_page, pages) + ramp(pages)
    start = np.repeat(flat.first_page[pieces.item] + pieces.first_page, pages)
    counts = pieces.stop_entry - pieces.first_entry
    first_entry = flat.entry_indptr[pieces.item] + pieces.first_entry
    row, offset, bound, mask = flat.entries[:, np.repeat(first_entry, counts) + ramp(counts)]
    first = np.repeat(flat.first_page[pieces.item] + pieces.first_page, counts)
    explicit = flat.explicit[pieces.item]
    # an entry's rank within its row is the index of its state
    state = np.empty(len(row), dtype=np.int32)
    patch = np.repeat(explicit, counts)
    zeros = np.zeros(len(pieces.item), dtype=np.int32)
    # each piece of a finishing tile has one entry; they are the last
    merged = len(row) - finishing
    finishes = np.arange(len(row)) >= merged
    state[np.lexsort((first, patch, offset, row, finishes))] = np.arange(len(row), dtype=np.int32)
    return HostWork(
        {
            "num_items": int32([len(zeros)]),
            "item_page_indptr": indptr_of(pages),
            "item_entry_indptr": indptr_of(counts),
            "item_kv_head": zeros - 1,
            "item_explicit": explicit,
            "page_indices": flat.pages[page_index],
            "page_positions": (start + ramp(pages)) * page_size,
            "entry_row": row,
            "entry_offset": offset,
            "entry_bound": bound,
            "entry_mask": mask,
            "entry_state": state,
            "mask_words": flat.mask_words,
            "row_positions": row_positions,
            "row_state_indptr": indptr_of(np.bincount(row[:merged], minlength=len(row_positions))),
            "row_own": finish_spans(
                len(row_positions),
                row[merged:],
                (indptr_of(pages)[len(zeros) - finishing :], offset[merged:], bound[merged:]),
                page_size,
            ),
            "tile_indptr": indptr_of([count for _, count in classes]),
        },
        tuple(tile for tile, _ in classes),
        flat.final[pieces.item],
    )


def make_work_list(
    items: Sequence[Item], rows: Sequence[DecodeRow], *, page_size: int, device: torch.device
) -> WorkList:
    """A `WorkList` of the uncut ``items``, with the states of a row side by side."""
    flat = FlatItems.create(items, [int32(item.pages) for item in items])
    positions = int32([row.position for row in rows])
    return host_work(flat, Pieces.whole(flat), positions, page_size).to(device)


def finish_spans(
    num_rows: int, rows: IntArray, items: tuple[IntArray, IntArray, IntArray], page_size: int
) -> IntArray:
    """The keys that rows read during the merge, for `looseleaf.ops.finish_rows`: first page slot,
    number of slots, Δ and bound of each row; no slots for a row without any. ``items`` are page
    prefix sums, offsets and bounds of the items of ``rows``."""
    indptr, offset, bound = items
    own = np.zeros((num_rows, OWN_NUMBERS), dtype=np.int32)
    own[rows] = np.stack([indptr[:-1], np.diff(indptr) * page_size, offset, bound], axis=1)
    return own.ravel()
