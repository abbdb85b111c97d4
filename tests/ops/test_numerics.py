"""The error of the decode kernels is within a budget that comes from the data, for every shape of
the sweep: heads, head dims, items of few rows or many, ragged, some of them empty.

Interpreted at small sizes; tests/gpu runs the same sweep in bf16 at large ones, up to 256 rows.
"""

from dataclasses import replace

import pytest
import torch

from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.lists import work_list
from looseleaf_lab.testing.numerics import HEAD_DIMS, HEADS, ragged_scene
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Scene, Shape

SMALL = Shape(num_documents=3, longest_document=40, longest_tail=9)


def decoded(scene: Scene, *, grouped: bool) -> AttnState:
    work = work_list(scene, grouped=grouped, pages_per_item=2)
    with poisoned():
        states = partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
            scene.slot_positions, "triton",
        )  # fmt: skip
        out = torch.empty_like(scene.q)
        return merge_states(states, work.row_state_indptr, out=out, implementation="triton")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_error_is_within_the_budget_of_the_data(heads: str, head_dim: int) -> None:
    dtype = torch.float16 if head_dim == 128 else torch.float32
    num_qo_heads, num_kv_heads = HEADS[heads]
    shape = replace(
        SMALL, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
    scene = ragged_scene(head_dim, shape, 3)
    truth, plain = dense_attention(scene), plain_attention(scene)
    for grouped in (True, False):
        assert_state_within_budget(decoded(scene, grouped=grouped), truth, plain, dtype)


@pytest.mark.parametrize("rows", [1, 33])
def test_an_item_may_have_any_number_of_rows(rows: int) -> None:
    shape = replace(SMALL, num_documents=2, longest_document=20, longest_tail=3, head_dim=64)
    scene = ragged_scene(rows, shape, rows)
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(decoded(scene, grouped=True), truth, plain, torch.float32)
