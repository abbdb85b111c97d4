"""A work list in which rows choose their pages on the device, layer by layer.

What rows read in any case is planned on the host as ever. In front of it stand items without pages
for what they choose, and for what earlier rows of the same outputs read anew: operators fill them
in every layer, so that one launch reads all of it and a step has no host work between its layers.
Everything has a fixed length that `ChosenShape` tells, so that steps replay as graphs."""

from dataclasses import dataclass

import numpy as np

from looseleaf.attention.lists import HostWork, IntArray, indptr_of, int32, ramp
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.select_pages import ChosenPages

# an item is one row's and one head's; of three pipeline stages each read was twice as slow as of
# two
CHOSEN_TILE = Tile(16, 64, 4, 2, 2, chosen=True)
# parts of chosen pages for all rows and heads together: about one a processor of a GPU
_PARTS = 132
# items that rows read in any case join the launch of chosen ones if none is longer
_SHORT_PAGES = 8


@dataclass(frozen=True)
class ChosenShape:
    """How many ``outputs`` choose at most, each with a ``window`` of rows, for how many KV heads,
    out of ``most`` candidates of ``most_spans`` spans; ``room`` pages for each row and head."""

    outputs: int
    window: int
    kv_heads: int
    most: int
    most_spans: int
    room: int
    page_size: int

    @property
    def num_items(self) -> int:
        """Items in front of the list."""
        return sum(places * (items + 1) for places, items in self._regions)

    @property
    def num_entries(self) -> int:
        """Entries in front of the list."""
        return sum(places * items for places, items in self._regions)

    @property
    def num_pages(self) -> int:
        """Pages in front of the list."""
        return sum(places for places, _ in self._regions) * self.room

    @property
    def items_of_rows(self) -> tuple[int, int]:
        """Items of a row and head that have entries: of a newest row, and of a past one."""
        (_, newest), (_, past) = self._regions
        return newest, past

    def newest(self, work: WorkList) -> ChosenPages:
        """Where `select_pages` writes in a list that `with_room` made."""
        items = self.items_of_rows[0]
        return ChosenPages(work, self.room, items - self.most_spans + 1, items, self._least_pages)

    def past(self, work: WorkList) -> ChosenPages:
        """Where `revise_pages` writes in it."""
        places, before = self._regions[0]
        items = self.items_of_rows[1]
        parts = items - self.most_spans + 1
        first = places * self.room, places * (before + 1), places * before
        return ChosenPages(work, self.room, parts, items, self._least_pages, *first)

    @property
    def _least_pages(self) -> int:
        return max(1, CHOSEN_TILE.block_n // self.page_size)

    @property
    def _regions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Places, and items of a place that have entries, of newest rows and of past ones."""
        newest = self.outputs * self.kv_heads
        past = newest * (self.window - 1)
        return (newest, self._items(newest)), (past, self._items(past))

    def _items(self, places: int) -> int:
        most = -(-self.room // self._least_pages)
        return max(1, min(most, _PARTS // max(1, places))) + self.most_spans - 1


def with_room(
    work: HostWork, rows: IntArray, shape: ChosenShape, *, joined: bool
) -> tuple[HostWork, IntArray]:
    """``work`` with items in front of it for what rows choose, and for every row of the step where
    its states of these begin: behind its others.

    ``rows`` ``[outputs, window]`` are rows of the step, the newest of each output first, -1 for
    none. With ``joined`` the other items are read in the same launch, each for one head.
    """
    if joined:
        work = _for_each_head(work, shape.kv_heads)
    old = work.arrays
    regions = list(zip((rows[:, 0], rows[:, 1:].reshape(-1)), shape.items_of_rows, strict=True))
    counts = np.diff(old["row_state_indptr"])
    more = counts.copy()
    for some, num in regions:
        more[some[some >= 0]] += num
    states = indptr_of(more)
    chosen_from = states[:-1] + counts
    heads, entry_row, entry_state, num_entries = (
        np.concatenate(columns)
        for columns in zip(
            *(_region(some, num, chosen_from, shape.kv_heads) for some, num in regions), strict=True
        )
    )
    # items of rows that there are not have states that nobody reads
    nobody = entry_state < 0
    entry_state[nobody] = states[-1] + np.arange(nobody.sum())
    # all empty, each where its place begins
    places = np.repeat(
        np.arange(shape.num_pages // shape.room, dtype=np.int32),
        np.concatenate([np.full(len(some) * shape.kv_heads, num + 1) for some, num in regions]),
    )
    shift = states[:-1] - old["row_state_indptr"][:-1]

    def behind(name: str, first: IntArray) -> IntArray:
        return np.concatenate([first, old[name]]).astype(np.int32)

    empty, none = np.zeros(shape.num_pages, np.int32), np.zeros_like(entry_row)
    arrays = {
        **old,
        "num_items": old["num_items"] + len(heads),
        "item_page_indptr": np.concatenate(
            [places * shape.room, old["item_page_indptr"] + shape.num_pages]
        ).astype(np.int32),
        "item_entry_indptr": np.concatenate(
            [indptr_of(num_entries)[:-1], old["item_entry_indptr"] + len(entry_row)]
        ).astype(np.int32),
        "item_kv_head": behind("item_kv_head", heads),
        "item_explicit": behind("item_explicit", np.zeros_like(heads)),
        "page_indices": behind("page_indices", empty),
        "page_positions": behind("page_positions", empty),
        "entry_row": behind("entry_row", entry_row),
        "entry_offset": behind("entry_offset", none),
        "entry_bound": behind("entry_bound", none),
        "entry_mask": behind("entry_mask", none - 1),
        "entry_state": np.concatenate(
            [entry_state, old["entry_state"] + shift[old["entry_row"]]]
        ).astype(np.int32),
        "row_state_indptr": states,
    }
    total = len(arrays["item_kv_head"])
    if joined:
        return HostWork({**arrays, "tile_indptr": int32([0, total])}, (CHOSEN_TILE,)), chosen_from
    arrays["tile_indptr"] = np.append(int32([0]), old["tile_indptr"] + np.int32(len(heads)))
    return HostWork(arrays, (CHOSEN_TILE, *work.tiles)), chosen_from


def may_join(work: HostWork) -> bool:
    """Whether the items of ``work`` had better be read in the launch of chosen ones: all short."""
    return bool(np.diff(work.arrays["item_page_indptr"]).max(initial=0) <= _SHORT_PAGES)


def _region(
    rows: IntArray, num: int, chosen_from: IntArray, kv_heads: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Of every place of ``rows``, with ``num`` items and one more: the heads of items; rows and
    states of entries, -1 where there is no row; and the entries of items."""
    there = np.maximum(rows, 0)
    first = np.where(rows >= 0, chosen_from[there], -num) if len(rows) else rows
    each = np.tile(np.append(np.ones(num, np.int32), 0), len(rows) * kv_heads)
    state = np.repeat(first, kv_heads)[:, None] + np.arange(num, dtype=np.int32)
    heads = np.repeat(np.tile(np.arange(kv_heads, dtype=np.int32), len(rows)), num + 1)
    return heads, int32(np.repeat(there, kv_heads * num)), int32(state.reshape(-1)), int32(each)


def _for_each_head(work: HostWork, kv_heads: int) -> HostWork:
    """``work`` with every item once for each KV head, and no tiles."""
    old = work.arrays
    again = np.repeat(np.arange(work.num_items, dtype=np.int32), kv_heads)
    pages, first_page = np.diff(old["item_page_indptr"])[again], old["item_page_indptr"][again]
    entries, first_entry = np.diff(old["item_entry_indptr"])[again], old["item_entry_indptr"][again]
    page = np.repeat(first_page, pages) + ramp(pages)
    entry = np.repeat(first_entry, entries) + ramp(entries)
    heads = np.tile(np.arange(kv_heads, dtype=np.int32), work.num_items)
    arrays = {
        **old,
        "num_items": int32([len(again)]),
        "item_page_indptr": indptr_of(pages),
        "item_entry_indptr": indptr_of(entries),
        "item_kv_head": heads,
        "item_explicit": old["item_explicit"][again],
        **{name: old[name][page] for name in ("page_indices", "page_positions")},
        **{name: values[entry] for name, values in old.items() if name.startswith("entry_")},
    }
    return HostWork(arrays, ())
