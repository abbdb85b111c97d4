"""The numbers of a planned work list in the layout of its kernel: one load per item or entry.

Separate lookups would add up their latencies before the first key is loaded. An item has eight
numbers: first page, pages, first entry, entries, KV head (or -1), positions of its first and last
page, and a flag. The flag is 1 if no key of the item is written in this step; the kernel then loads
keys before it waits for the previous kernel. An entry has four numbers: query row, position of the
row in the frame, bound and state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]


def number_sizes(items: int, entries: int) -> dict[str, int]:
    """Lengths of both arrays."""
    return {"item_numbers": 8 * items, "entry_numbers": 4 * entries}


def unit_numbers(
    arrays: Mapping[str, IntArray], final: IntArray | None = None
) -> dict[str, IntArray]:
    """``item_numbers`` and ``entry_numbers`` of the arrays of a work list.

    ``final`` is the flag of each item; None means 0 for all."""
    pages, entries = arrays["item_page_indptr"], arrays["item_entry_indptr"]
    items = len(arrays["item_kv_head"])
    first, stop = pages[:items], pages[1 : items + 1]
    positions = arrays["page_positions"] if len(arrays["page_positions"]) else np.zeros(1, np.int32)
    ends = [np.clip(index, 0, len(positions) - 1) for index in (first, np.maximum(first, stop - 1))]
    first_entry = entries[:items]
    of_items = (
        first, stop - first, first_entry, entries[1 : items + 1] - first_entry,
        arrays["item_kv_head"], positions[ends[0]], positions[ends[1]],
        np.zeros_like(first) if final is None else final,
    )  # fmt: skip
    row, positions_of_rows = arrays["entry_row"], arrays["row_positions"]
    frame_position = (
        positions_of_rows[np.clip(row, 0, len(positions_of_rows) - 1)] - arrays["entry_offset"]
    )
    of_entries = row, frame_position, arrays["entry_bound"], arrays["entry_state"]
    return {
        "item_numbers": np.stack(of_items, axis=1).astype(np.int32).ravel(),
        "entry_numbers": np.stack(of_entries, axis=1).astype(np.int32).ravel(),
    }
