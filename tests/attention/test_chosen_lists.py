"""A list in which rows choose has a state for every part of what each reads, and none for two."""

from itertools import chain

import numpy as np
import pytest
import torch

from looseleaf.attention.plan.cost_model import default_cost_model
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.plan.planner import Planner
from looseleaf.attention.select.worklist_fill import ChosenShape, with_room

PAGE = 16


def decode_rows(count: int) -> list[DecodeRow]:
    tails = (ReadSpan([row], 400, 5, 0) for row in range(count))
    return [DecodeRow(404, (), tail) for tail in tails]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("outputs", [[[0], [1], [2]], [[1, 0], [2, -1], [-1, -1]]])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_state_of_a_list_with_chosen_pages_is_written_once(
    kv_heads: int, outputs: list[list[int]], joined: bool
) -> None:
    planner = Planner(
        PAGE, 4 * kv_heads, kv_heads, torch.device("cpu"), default_cost_model(64, 2, 132)
    )
    rows = decode_rows(3)
    work = planner.host_work(rows, planner.group(rows, grouping=True))
    assert work is not None
    shape = ChosenShape(len(outputs), len(outputs[0]), kv_heads, 4, 64, 2, 16, PAGE)
    made, chosen_from = with_room(work, np.array(outputs, np.int32), shape, joined=joined)
    arrays = made.arrays
    written: dict[int, list[int]] = {}
    for item in range(made.num_items):
        for entry in range(*arrays["item_entry_indptr"][item : item + 2]):
            head = int(arrays["item_kv_head"][item])
            for each in range(kv_heads) if head < 0 else [head]:
                written.setdefault(each, []).append(int(arrays["entry_state"][entry]))
    assert sorted(written) == list(range(kv_heads))
    states = range(arrays["row_state_indptr"][-1])
    for each in written.values():
        assert len(each) == len(set(each)) and set(states) <= set(each)
    # what a row chooses stands behind what it reads in any case
    for row in filter(lambda row: row >= 0, chain(*outputs)):
        before = arrays["row_state_indptr"][row + 1] - chosen_from[row]
        assert before == shape.items_per_head
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
