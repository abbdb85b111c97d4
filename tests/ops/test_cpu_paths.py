"""The CPU paths answer to the references: every rule, mask, patch, empty row, dtype and shape."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.flash.cpu import attend_dense
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.prefill_attention import cpu, prefill_attention
from looseleaf.types import AttnState, ScoreRule
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.scene import Scene, Shape, with_values
from looseleaf_lab.testing.variants import VARIANTS

BATCHED = [name for name, shape in VARIANTS.items() if not shape.per_head]
EVERY_VARIANT = pytest.mark.parametrize("variant", BATCHED)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
SHAPES = st.builds(
    Shape,
    num_qo_heads=st.just(4),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 48]),
    page_size=st.sampled_from([16, 32]),
    rotary_dim=st.sampled_from([None, 0, 12]),
    interleaved=st.booleans(),
    soft_cap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 25]),
    alibi=st.booleans(),
    masks=st.booleans(),
    patches=st.booleans(),
    num_requests=st.integers(1, 5),
)


def finite(scene: Scene) -> Scene:
    """The scene in a pool as the engine keeps it: what nobody sees is a number, whichever."""
    for pages in (scene.k_pages, scene.v_pages):
        pages.nan_to_num_(nan=50.0)
    return scene


def decode_scene(seed: int, shape: Shape) -> Scene:
    return finite(SceneBuilder(seed, shape).decode())


def attended(scene: Scene, work: WorkList, implementation: Implementation = "cpu") -> AttnState:
    states = partial_attention(
        scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
        scene.slot_positions, implementation,
    )  # fmt: skip
    return merge_states(states, work.row_state_indptr)


def prefilled(seed: int, shape: Shape, tile_rows: int) -> tuple[Scene, AttnState]:
    scene, rows_of, spans_of = SceneBuilder(seed, shape).prefill()
    finite(scene)
    state = prefill_attention(
        scene.q, scene.k_pages, scene.v_pages,
        span_list(scene, rows_of, spans_of, tile_rows=tile_rows), scene.rotation, scene.rule,
        scene.slot_positions, "cpu",
    )  # fmt: skip
    return scene, state


def assert_right(actual: AttnState, scene: Scene) -> None:
    dtype = scene.shape.dtype
    plain = plain_attention(scene)
    actual = with_values(scene, actual)
    assert_state_within_budget(actual, dense_attention(scene), plain, dtype)


@EVERY_VARIANT
def test_decode_attends_within_the_budget(variant: str) -> None:
    scene = decode_scene(11, VARIANTS[variant])
    for grouped, pages in [(True, None), (False, 1)]:
        assert_right(
            attended(scene, work_list(scene, grouped=grouped, pages_per_item=pages)), scene
        )


@EVERY_VARIANT
def test_prefill_attends_within_the_budget(variant: str) -> None:
    for tile_rows in (4, 64):
        scene, state = prefilled(12, VARIANTS[variant], tile_rows)
        assert_right(state, scene)


@settings(max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**16), pages=st.integers(1, 4), grouped=st.booleans())
def test_decode_is_dense_attention_under_random_rules(
    shape: Shape, seed: int, pages: int, grouped: bool
) -> None:
    scene = decode_scene(seed, shape)
    work = work_list(scene, grouped=grouped, pages_per_item=pages, seed=seed)
    assert_right(attended(scene, work), scene)


@settings(max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**16), tile_rows=st.sampled_from([1, 7, 64]))
def test_prefill_is_dense_attention_under_random_rules(
    shape: Shape, seed: int, tile_rows: int
) -> None:
    scene, state = prefilled(seed, shape, tile_rows)
    assert_right(state, scene)


@settings(max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_many_rows_read_a_span_in_blocks_from_the_first_that_sees_a_key(
    shape: Shape, seed: int
) -> None:
    with patch.multiple(cpu, _FEW_ROWS=0, _LONG_SPAN=1, _BLOCK_ROWS=3):
        scene, state = prefilled(seed, shape, 64)
    assert_right(state, scene)


@HALF
@pytest.mark.parametrize("variant", ["gqa", "soft-cap", "window", "alibi", "everything"])
def test_half_precision_attends_within_the_budget(variant: str, dtype: torch.dtype) -> None:
    shape = replace(VARIANTS[variant], dtype=dtype)
    scene = decode_scene(13, shape)
    assert_right(attended(scene, work_list(scene)), scene)
    assert_right(*reversed(prefilled(13, shape, 64)))
    with patch.multiple(cpu, _FEW_ROWS=0, _LONG_SPAN=1, _BLOCK_ROWS=3):
        assert_right(*reversed(prefilled(13, shape, 64)))


def test_no_items_are_empty_states() -> None:
    scene = decode_scene(15, Shape())
    work = work_list(scene)
    nothing = replace(work, num_items=torch.zeros_like(work.num_items))
    state = partial_attention(
        scene.q, scene.k_pages, scene.v_pages, nothing, scene.rotation, scene.rule,
        implementation="cpu",
    )  # fmt: skip
    assert state.lse.shape == (nothing.state_capacity, 4)
    assert (state.lse == -torch.inf).all()
    assert not state.out.any()


def test_items_of_single_heads_are_refused_not_answered_wrongly() -> None:
    scene = decode_scene(16, VARIANTS["per-head-pages"])
    with pytest.raises(InvalidOption, match="per-head"):
        attended(scene, work_list(scene))


def test_patches_without_slot_positions_are_refused() -> None:
    scene = decode_scene(17, VARIANTS["patches"])
    with pytest.raises(InvalidOption, match="slot_positions"):
        partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work_list(scene), scene.rotation, scene.rule,
            implementation="cpu",
        )  # fmt: skip


@pytest.mark.parametrize("rows", [128, 129, 300])
@pytest.mark.parametrize("sight", ["all", "causal", "bias", "bias for all rows", "blind"])
def test_many_rows_under_a_cap_are_read_in_blocks(rows: int, sight: str) -> None:
    q, (k, v) = torch.randn(1, 4, rows, 16).double(), torch.randn(2, 1, 2, rows, 16).double()
    rule, causal = ScoreRule(0.5, soft_cap=2.0), sight == "causal"
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    elif sight != "all":
        seen = torch.rand(1 if sight == "bias for all rows" else rows, rows) < 0.5
    if sight == "blind":
        seen[rows // 2 :: 7] = False
    hidden = ~seen
    bias = None if sight in ("all", "causal") else torch.zeros(hidden.shape).double()
    if bias is not None:
        bias = bias.masked_fill(hidden, -torch.inf)[None, None]
    blind = hidden.all(1)[None, None] if sight == "blind" else None
    out, lse = attend_dense(q, k, v, rule, bias, blind, causal)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 2.0 * torch.tanh(0.5 * (q @ keys.transpose(-1, -2)) / 2.0)
    scores = scores.masked_fill(hidden, -torch.inf)
    # scores are fp32 in it
    expected = scores.softmax(-1).nan_to_num(0.0) @ values
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
