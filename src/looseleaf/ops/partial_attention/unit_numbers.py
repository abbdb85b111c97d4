"""What a program of a planned list must know, side by side: looked up one after another, numbers
cost a latency each before the first key is read.

For an item eight numbers: first page, pages, first entry, entries, KV head (or -1), positions of
its first and last page, and 1 if no key of it is written while it is read, so that a kernel may
fetch it before it waits for the one in front; for an entry four: row, position of the row in the
frame, bound and state.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]


def number_sizes(items: int, entries: int) -> dict[str, int]:
    """How long both arrays are."""
    return {"item_numbers": 8 * items, "entry_numbers": 4 * entries}


def unit_numbers(
    arrays: Mapping[str, IntArray], final: IntArray | None = None
) -> dict[str, IntArray]:
    """``item_numbers`` and ``entry_numbers`` of the arrays of a work list, whose ``final`` items
    are 1; of None none is."""
    pages, entries = arrays["item_page_indptr"], arrays["item_entry_indptr"]
    items = len(arrays["item_kv_head"])
    first, stop = pages[:items], pages[1 : items + 1]
    positions = arrays["page_positions"] if len(arrays["page_positions"]) else np.zeros(1, np.int32)
    ends = [np.clip(place, 0, len(positions) - 1) for place in (first, np.maximum(first, stop - 1))]
    first_entry = entries[:items]
    of_items = (
        first, stop - first, first_entry, entries[1 : items + 1] - first_entry,
        arrays["item_kv_head"], positions[ends[0]], positions[ends[1]],
        np.zeros_like(first) if final is None else final,
    )  # fmt: skip
    row, at = arrays["entry_row"], arrays["row_positions"]
    frame_position = at[np.clip(row, 0, len(at) - 1)] - arrays["entry_offset"]
    of_entries = row, frame_position, arrays["entry_bound"], arrays["entry_state"]
    return {
        "item_numbers": np.stack(of_items, axis=1).astype(np.int32).ravel(),
        "entry_numbers": np.stack(of_entries, axis=1).astype(np.int32).ravel(),
    }
