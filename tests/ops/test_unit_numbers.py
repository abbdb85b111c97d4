"""What programs look up side by side is what the lists say."""

import numpy as np

from looseleaf.attention.groups import Entry, Item
from looseleaf.attention.lists import FlatItems, Pieces, host_work, int32
from looseleaf.ops.partial_attention.unit_numbers import unit_numbers


def pieces_of_two_items() -> dict[str, np.ndarray]:
    items = [
        Item([4, 7, 9, 2], 1, [Entry(0, 5, 60), Entry(2, 8, 61), Entry(1, 0, 64)]),
        Item([3], 0, [Entry(1, 64, 9)]),
    ]
    flat = FlatItems.create(items, [int32(item.pages) for item in items])
    pieces = Pieces.cut(flat, int32([2, 1]), int32([2, 1]))
    return host_work(flat, pieces, int32([90, 72, 99]), 16).arrays


def test_numbers_of_items_and_entries_are_those_of_the_lists() -> None:
    arrays = pieces_of_two_items()
    numbers = unit_numbers(arrays)
    pages, entries = arrays["item_page_indptr"], arrays["item_entry_indptr"]
    for item, found in enumerate(numbers["item_numbers"].reshape(-1, 8)):
        positions = arrays["page_positions"][pages[item] : pages[item + 1]]
        assert found[0] == pages[item]
        assert found[1] == len(positions)
        assert found[2] == entries[item]
        assert found[3] == entries[item + 1] - entries[item]
        assert found[4] == arrays["item_kv_head"][item]
        assert found[5:7].tolist() == [positions[0], positions[-1]]
    for entry, found in enumerate(numbers["entry_numbers"].reshape(-1, 4)):
        row = arrays["entry_row"][entry]
        at = arrays["row_positions"][row] - arrays["entry_offset"][entry]
        bound, state = arrays["entry_bound"][entry], arrays["entry_state"][entry]
        assert found.tolist() == [row, at, bound, state]
