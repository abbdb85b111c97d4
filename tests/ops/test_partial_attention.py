"""Laws 1, 2 and 3 at the level of the operator, for the reference and the kernel alike.

Every scene poisons with NaN what no row may see, and fills unused capacity with garbage.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Scene, Shape, with_values
from looseleaf_lab.testing.variants import VARIANTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
SHAPES = st.builds(
    Shape,
    num_qo_heads=st.just(4),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 48]),
    page_size=st.sampled_from([16, 32]),
    dtype=st.just(torch.float64),
    rotary_dim=st.sampled_from([None, 0, 12]),
    interleaved=st.booleans(),
    soft_cap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 25]),
    alibi=st.booleans(),
    masks=st.booleans(),
    patches=st.booleans(),
    per_head=st.booleans(),
    num_requests=st.integers(1, 4),
    longest_document=st.sampled_from([10, 50]),
)


def decode_scene(seed: int, shape: Shape) -> Scene:
    return SceneBuilder(seed, replace(shape, device=DEVICE)).decode()


def partial_states(scene: Scene, work: WorkList, implementation: str) -> AttnState:
    with poisoned():
        states = partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
            scene.slot_positions, implementation,  # type: ignore[arg-type]
        )  # fmt: skip
    return with_values(scene, states)


def attended(scene: Scene, work: WorkList, implementation: str) -> AttnState:
    states = partial_states(scene, work, implementation)
    return merge_states(states, work.row_state_indptr, implementation=implementation)  # type: ignore[arg-type]


@EVERY_VARIANT
def test_merged_partial_states_are_attention_over_all_keys_at_their_true_positions(
    variant: str,
) -> None:
    """Law 1 and law 2: a segment read at Δ equals its keys encoded there."""
    scene = decode_scene(1, replace(VARIANTS[variant], dtype=torch.float64))
    actual = attended(scene, work_list(scene), "reference")
    torch.testing.assert_close(tuple(actual), tuple(dense_attention(scene)))


@settings(max_examples=20)
@given(shape=SHAPES, seed=st.integers(0, 2**16), pages=st.integers(1, 4))
def test_grouping_and_splitting_change_nothing(shape: Shape, seed: int, pages: int) -> None:
    """Law 3, and law 1 once more, over random rules and features."""
    scene = decode_scene(seed, shape)
    expected = tuple(dense_attention(scene))
    for grouped, per_item in [(True, None), (False, None), (True, pages), (False, pages)]:
        work = work_list(scene, grouped=grouped, pages_per_item=per_item, seed=seed)
        torch.testing.assert_close(tuple(attended(scene, work, "reference")), expected)


@EVERY_VARIANT
def test_kernel_attends_within_the_budget(variant: str) -> None:
    """Rows are grouped in half of the variants, and fp16 in half of either kind.

    The interpreter has no right bf16 product."""
    number = list(VARIANTS).index(variant)
    grouped, dtype = number % 2 == 0, torch.float16 if number % 4 < 2 else torch.float32
    scene = decode_scene(2, replace(VARIANTS[variant], dtype=dtype, num_requests=3))
    work = work_list(scene, grouped=grouped, pages_per_item=None if grouped else 2)
    actual = attended(scene, work, "triton")
    plain = plain_attention(scene)
    assert_state_within_budget(actual, dense_attention(scene), plain, dtype)


def test_kernel_writes_the_states_that_the_reference_writes() -> None:
    scene = decode_scene(5, replace(VARIANTS["everything"], per_head=True))
    work = work_list(scene, pages_per_item=1)
    mine, truth = (partial_states(scene, work, name) for name in ("triton", "reference"))
    there = truth.lse > -torch.inf
    assert torch.equal(mine.lse > -torch.inf, there)
    assert not there.all()
    torch.testing.assert_close(mine.lse[there], truth.lse[there])
    torch.testing.assert_close(mine.out[there], truth.out[there])
    assert mine.out.dtype == mine.lse.dtype == torch.float32


@BOTH
def test_an_item_may_have_any_number_of_rows(implementation: str) -> None:
    shape = Shape(num_requests=50, num_documents=1, longest_tail=3, head_dim=32)
    scene = decode_scene(6, shape)
    work = work_list(scene)
    assert work.item_entry_indptr[: int(work.num_items) + 1].diff().max() > 32
    actual = attended(scene, work, implementation)
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(actual, truth, plain, torch.float32)


@BOTH
@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_what_entries_have_seen_and_what_they_have_not_is_all_there_is(
    implementation: str, variant: str
) -> None:
    """Later entries of an item split its pages by a bit; the first one reads all of them."""
    shape = replace(VARIANTS["everything"], per_head=True) if variant == "everything" else Shape()
    scene = decode_scene(8, replace(shape, num_documents=1))
    work = work_list(scene)
    bit = torch.arange(len(work.page_indices), dtype=torch.int32, device=DEVICE) // 2 % 2
    first, second, whole = (
        partial_states(scene, replace(work, page_seen=seen), implementation)
        for seen in (bit, 1 - bit, None)
    )
    # what stands behind the bits that are given is new to everybody
    none = partial_states(scene, replace(work, page_seen=bit[:0]), implementation)
    assert torch.equal(none.lse, whole.lse)
    indptr = work.item_entry_indptr[: int(work.num_items) + 1].long()
    later = torch.ones(int(indptr[-1]), dtype=torch.bool, device=DEVICE)
    later[indptr[:-1][indptr.diff() > 0]] = False
    states = work.entry_state[: len(later)].long()
    assert later.any() and (first.lse[states] != whole.lse[states])[later].any()
    joined = torch.logaddexp(first.lse, second.lse)[states]
    torch.testing.assert_close(joined[later], whole.lse[states][later])
    assert torch.equal(first.lse[states][~later], whole.lse[states][~later])
    weight = (first.lse - torch.logaddexp(first.lse, second.lse)).exp().nan_to_num(0.0)[..., None]
    out = torch.where(weight > 0, first.out, 0) * weight
    out += torch.where(weight < 1, second.out, 0) * (1 - weight)
    there = later[:, None] & (joined > -torch.inf)
    torch.testing.assert_close(out[states][there], whole.out[states][there])


@BOTH
def test_no_items_are_empty_states(implementation: str) -> None:
    scene = decode_scene(7, Shape())
    work = work_list(scene)
    nothing = replace(work, num_items=torch.zeros_like(work.num_items))
    assert (partial_states(scene, nothing, implementation).lse == -torch.inf).all()


@BOTH
def test_strides_are_free(implementation: str) -> None:
    scene = decode_scene(8, Shape())
    work = work_list(scene)
    expected = attended(scene, work, implementation)
    pool = torch.stack([scene.k_pages, scene.v_pages], 1)
    fused = torch.stack([scene.q, scene.q], -1)
    strided = replace(scene, q=fused[..., 1], k_pages=pool[:, 0], v_pages=pool[:, 1])
    actual = attended(strided, work, implementation)
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)


@BOTH
def test_a_row_does_not_depend_on_its_batch_mates(implementation: str) -> None:
    """Law 6 for one operator: the state is bit for bit that of the row alone."""
    scene = decode_scene(9, Shape(num_requests=6))
    together = attended(scene, work_list(scene, grouped=False), implementation)
    for row in range(len(scene.row_positions)):
        mine = [replace(r, row=0) for r in scene.readings if r.row == row]
        alone = replace(
            scene, q=scene.q[row : row + 1], row_positions=scene.row_positions[row : row + 1],
            readings=mine,
        )  # fmt: skip
        # the order of a row's states is that of the unshuffled items in both lists
        state = attended(alone, work_list(alone, grouped=False), implementation)
        torch.testing.assert_close(state.out[0], together.out[row])
        torch.testing.assert_close(state.lse[0], together.lse[row])
