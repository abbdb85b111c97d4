"""What programs look up side by side is what the lists say."""

from looseleaf.attention.plan.groups import Entry, Item
from looseleaf.attention.plan.lists import FlatItems, HostWork, Pieces, host_work, int32
from looseleaf.ops.partial_attention.unit_numbers import unit_numbers


def pieces_of_two_items() -> HostWork:
    items = [
        Item([4, 7, 9, 2], 1, [Entry(0, 5, 60), Entry(2, 8, 61), Entry(1, 0, 64)]),
        Item([3], 0, [Entry(1, 64, 9)]),
    ]
    pages = [int32(item.pages) for item in items]
    flat = FlatItems.concatenate(
        [FlatItems.create(items[:1], pages[:1], final=True), FlatItems.create(items[1:], pages[1:])]
    )
    pieces = Pieces.cut(flat, int32([2, 1]), int32([2, 1]))
    return host_work(flat, pieces, int32([90, 72, 99]), 16)


def test_numbers_of_items_and_entries_are_those_of_the_lists() -> None:
    work = pieces_of_two_items()
    arrays = work.arrays
    numbers = unit_numbers(arrays, work.final)
    pages, entries = arrays["item_page_indptr"], arrays["item_entry_indptr"]
    for item, found in enumerate(numbers["item_numbers"].reshape(-1, 8)):
        positions = arrays["page_positions"][pages[item] : pages[item + 1]]
        assert found[0] == pages[item]
        assert found[1] == len(positions)
        assert found[2] == entries[item]
        assert found[3] == entries[item + 1] - entries[item]
        assert found[4] == arrays["item_kv_head"][item]
        assert found[5:7].tolist() == [positions[0], positions[-1]]
    # all pieces of the first item are final, and nothing is where nobody says so
    assert numbers["item_numbers"][7::8].tolist() == [1, 1, 1, 1, 0]
    assert not unit_numbers(arrays)["item_numbers"][7::8].any()
    for entry, found in enumerate(numbers["entry_numbers"].reshape(-1, 4)):
        row = arrays["entry_row"][entry]
        at = arrays["row_positions"][row] - arrays["entry_offset"][entry]
        bound, state = arrays["entry_bound"][entry], arrays["entry_state"][entry]
        assert found.tolist() == [row, at, bound, state]
