"""A work list with reserved items, in which operators write each layer's chosen pages.

The host plans the always-read pages as usual. Reserved items without pages precede them; operators
fill these in every layer. So one launch reads all pages, and no host work is needed between layers.
Past rows of an output are entries of the newest row's items: they read its pages, except pages that
they have seen. All lengths depend on `ChosenShape` only, so steps replay as CUDA graphs."""

from dataclasses import dataclass

import numpy as np

from looseleaf.attention.plan.lists import HostWork, IntArray, indptr_of, int32, ramp
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.select_pages import ChosenPages

# keys of a tile: an item belongs to one output and one head
_TILE_KEYS = 64
# parts of chosen pages over all rows and heads: about one a multiprocessor
_PARTS = 132
# always-read items join the launch of chosen ones if none is longer
_SHORT_PAGES = 8


@dataclass(frozen=True)
class ChosenShape:
    """Sizes of the reserved items.

    At most ``outputs`` outputs choose, each with a ``window`` of rows, in ``kv_heads`` KV heads of
    ``group`` query heads. A row has at most ``most`` candidates in ``most_spans`` spans; each
    output and head has ``room`` pages."""

    outputs: int
    window: int
    kv_heads: int
    group: int
    most: int
    most_spans: int
    room: int
    page_size: int

    @property
    def output_heads(self) -> int:
        """Outputs times KV heads: each has its own items."""
        return self.outputs * self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of all outputs."""
        return self.outputs * self.window

    @property
    def num_parts(self) -> int:
        """Parts of the chosen pages of an output and head."""
        most = -(-self.room // self._least_pages)
        return max(1, min(most, _PARTS // max(1, self.output_heads)))

    @property
    def items_per_head(self) -> int:
        """Items of an output and head that have entries."""
        return self.num_parts + self.most_spans - 1

    @property
    def num_pages(self) -> int:
        """Reserved pages at the start of the list."""
        return self.output_heads * self.room

    @property
    def tile(self) -> Tile:
        """The tile of the reserved items, which holds all rows of an output."""
        rows = max(16, power_of_two(self.window * self.group))
        # a third stage is slower with few programs, faster with many
        stages = 2 if self.output_heads * self.items_per_head <= 2 * _PARTS else 3
        return Tile(rows, _TILE_KEYS, 4, stages, 3, chosen=True)

    def chosen(self, work: WorkList) -> ChosenPages:
        """The region of a list of `with_room` that `select_pages` writes."""
        return ChosenPages(
            work, self.room, self.num_parts, self.items_per_head, self._least_pages, self.window
        )

    @property
    def _least_pages(self) -> int:
        return max(1, _TILE_KEYS // self.page_size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()


def with_room(
    work: HostWork, rows: IntArray, shape: ChosenShape, *, joined: bool
) -> tuple[HostWork, IntArray]:
    """``work`` with reserved items at its start, and for every step row the index of its first
    reserved state, which follows the row's other states.

    ``rows`` ``[outputs, window]`` are step rows, the newest of each output first, -1 for none. With
    ``joined`` the other items are read in the same launch, each for one head.
    """
    if joined:
        work = _for_each_head(work, shape.kv_heads)
    old, num = work.arrays, shape.items_per_head
    counts = np.diff(old["row_state_indptr"])
    num_states = counts.copy()
    num_states[rows[rows >= 0]] += num
    states = indptr_of(num_states)
    chosen_from = states[:-1] + counts
    entry_row, entry_state = _entries(rows, num, chosen_from, shape.kv_heads)
    # states of absent rows lie past the end, unread
    absent = entry_state < 0
    entry_state[absent] = states[-1] + np.arange(absent.sum())
    heads = np.tile(np.repeat(np.arange(shape.kv_heads, dtype=np.int32), num + 1), shape.outputs)
    # the last item of an output and head has no entries; all begin at its first page
    num_entries = np.tile(np.append(np.full(num, shape.window), 0), shape.output_heads)
    output_head = np.repeat(np.arange(shape.output_heads, dtype=np.int32), num + 1)
    shift = states[:-1] - old["row_state_indptr"][:-1]

    def after(name: str, first: IntArray) -> IntArray:
        return np.concatenate([first, old[name]]).astype(np.int32)

    empty, zeros = np.zeros(shape.num_pages, np.int32), np.zeros_like(entry_row)
    arrays = {
        **old,
        "num_items": old["num_items"] + len(heads),
        "item_page_indptr": np.concatenate(
            [output_head * shape.room, old["item_page_indptr"] + shape.num_pages]
        ).astype(np.int32),
        "item_entry_indptr": np.concatenate(
            [indptr_of(num_entries)[:-1], old["item_entry_indptr"] + len(entry_row)]
        ).astype(np.int32),
        "item_kv_head": after("item_kv_head", heads),
        "item_explicit": after("item_explicit", np.zeros_like(heads)),
        "page_indices": after("page_indices", empty),
        "page_positions": after("page_positions", empty),
        "entry_row": after("entry_row", entry_row),
        "entry_offset": after("entry_offset", zeros),
        "entry_bound": after("entry_bound", zeros),
        "entry_mask": after("entry_mask", zeros - 1),
        "entry_state": np.concatenate(
            [entry_state, old["entry_state"] + shift[old["entry_row"]]]
        ).astype(np.int32),
        "row_state_indptr": states,
    }
    total = len(arrays["item_kv_head"])
    if joined:
        return HostWork({**arrays, "tile_indptr": int32([0, total])}, (shape.tile,)), chosen_from
    arrays["tile_indptr"] = np.append(int32([0]), old["tile_indptr"] + np.int32(len(heads)))
    return HostWork(arrays, (shape.tile, *work.tiles)), chosen_from


def may_join(work: HostWork) -> bool:
    """Whether all items of ``work`` are short enough for the launch of chosen pages."""
    return bool(np.diff(work.arrays["item_page_indptr"]).max(initial=0) <= _SHORT_PAGES)


def _entries(
    rows: IntArray, num: int, chosen_from: IntArray, kv_heads: int
) -> tuple[IntArray, IntArray]:
    """Rows and states of the entries by output, KV head, item and age; states are negative for
    absent rows."""
    safe_rows = np.maximum(rows, 0)  # [outputs, window]
    nth = np.arange(num, dtype=np.int32)[:, None]
    state = np.where(rows >= 0, chosen_from[safe_rows], -num)[:, None, None] + nth
    row = np.repeat(safe_rows[:, None, None], num, axis=2)
    # writable copies, of a single KV head too
    entry_row, entry_state = (
        np.repeat(numbers, kv_heads, axis=1).ravel() for numbers in (row, state)
    )
    return int32(entry_row), int32(entry_state)


def _for_each_head(work: HostWork, kv_heads: int) -> HostWork:
    """``work`` with every item once for each KV head, and without tiles."""
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
