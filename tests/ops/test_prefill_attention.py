"""Laws of prefill attention: what every row sees, at true positions, whatever tile it is in."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.ops.prefill_attention import SpanList, prefill_attention
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import span_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Placement, Scene, Shape, with_values
from looseleaf_lab.testing.variants import VARIANTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
PREFILL_VARIANTS = {name: shape for name, shape in VARIANTS.items() if not shape.per_head}
EVERY_VARIANT = pytest.mark.parametrize("variant", PREFILL_VARIANTS)
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
    num_requests=st.integers(1, 3),
    longest_document=st.sampled_from([10, 50]),
    most_rows=st.sampled_from([1, 10]),
)

Requests = tuple[Scene, list[list[int]], list[list[Placement]]]


def prefill_scene(seed: int, shape: Shape) -> Requests:
    return SceneBuilder(seed, replace(shape, device=DEVICE)).prefill()


def attended(scene: Scene, spans: SpanList, implementation: str) -> AttnState:
    with poisoned():
        state = prefill_attention(
            scene.q, scene.k_pages, scene.v_pages, spans, scene.rotation, scene.rule,
            scene.slot_positions, implementation,  # type: ignore[arg-type]
        )  # fmt: skip
    return with_values(scene, state)


@EVERY_VARIANT
def test_prefill_is_attention_over_all_earlier_keys_at_their_true_positions(variant: str) -> None:
    """Law 2 for spans, and causality by position."""
    shape = replace(PREFILL_VARIANTS[variant], dtype=torch.float64)
    scene, rows_of, spans_of = prefill_scene(1, shape)
    spans = span_list(scene, rows_of, spans_of, tile_rows=8)
    torch.testing.assert_close(
        tuple(attended(scene, spans, "reference")), tuple(dense_attention(scene))
    )


@pytest.mark.parametrize(("variant", "parts"), [("masks", 7), ("patches", 2), ("plain", 7)])
def test_keys_read_in_parts_are_keys_read_at_once(variant: str, parts: int) -> None:
    """Also where a part has no key that a row sees."""
    features = {"masks": variant != "plain", "patches": variant == "patches"}
    shape = Shape(num_kv_heads=2, longest_document=90, most_rows=9, **features)
    scene, rows_of, spans_of = prefill_scene(3, shape)
    spans = span_list(scene, rows_of, spans_of, tile_rows=8)
    whole = attended(scene, spans, "triton")
    apart = attended(scene, replace(spans, parts=parts), "triton")
    torch.testing.assert_close(tuple(apart), tuple(whole))


@pytest.mark.parametrize("parts", [3])
def test_a_complete_list_needs_nothing_cleared(parts: int) -> None:
    """Also where a request has rows and nothing to read."""
    scene, rows_of, spans_of = prefill_scene(4, Shape(num_requests=3))
    for spans_of_first in (spans_of[0], []):
        spans = span_list(scene, rows_of, [spans_of_first, *spans_of[1:]], tile_rows=8)
        cleared = attended(scene, replace(spans, parts=parts), "triton")
        complete = replace(spans, parts=parts, complete=True)
        assert torch.equal(attended(scene, complete, "triton").out, cleared.out)


@settings(max_examples=20)
@given(shape=SHAPES, seed=st.integers(0, 2**16), tile_rows=st.integers(1, 12))
def test_how_rows_are_tiled_changes_nothing(shape: Shape, seed: int, tile_rows: int) -> None:
    scene, rows_of, spans_of = prefill_scene(seed, shape)
    expected = tuple(dense_attention(scene))
    for size in (tile_rows, 64):
        spans = span_list(scene, rows_of, spans_of, tile_rows=size)
        torch.testing.assert_close(tuple(attended(scene, spans, "reference")), expected)


@EVERY_VARIANT
def test_kernel_attends_within_the_budget(variant: str) -> None:
    """fp16 on every second variant; the interpreter has no right bf16 product."""
    dtype = torch.float16 if list(VARIANTS).index(variant) % 2 else torch.float32
    shape = replace(PREFILL_VARIANTS[variant], dtype=dtype, num_requests=3)
    scene, rows_of, spans_of = prefill_scene(2, shape)
    actual = attended(scene, span_list(scene, rows_of, spans_of, tile_rows=16), "triton")
    assert actual.out.dtype == dtype
    plain = plain_attention(scene)
    assert_state_within_budget(actual, dense_attention(scene), plain, dtype)


@pytest.mark.parametrize("tile_rows", [1, 64])
def test_kernel_takes_tiles_of_any_size(tile_rows: int) -> None:
    shape = replace(
        PREFILL_VARIANTS["everything"], num_requests=2, most_rows=20 if tile_rows == 1 else 60
    )
    scene, rows_of, spans_of = prefill_scene(3, shape)
    spans = span_list(scene, rows_of, spans_of, tile_rows=tile_rows)
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(attended(scene, spans, "triton"), truth, plain, torch.float32)


@BOTH
def test_a_row_never_depends_on_a_later_key(implementation: str) -> None:
    scene, rows_of, spans_of = prefill_scene(4, Shape(num_requests=1, most_rows=40))
    spans = span_list(scene, rows_of, spans_of, tile_rows=16)
    before = attended(scene, spans, implementation)
    row = len(scene.row_positions) // 2
    for placement in spans_of[0]:
        later = placement.offset + placement.segment.positions > scene.row_positions[row]
        for at in torch.nonzero(later).flatten().tolist():
            page, slot = placement.segment.pages[at // 16], at % 16
            scene.k_pages[page, :, slot] = scene.v_pages[page, :, slot] = 100.0
    after = attended(scene, spans, implementation)
    assert torch.equal(after.out[: row + 1], before.out[: row + 1])
    assert not torch.equal(after.out[row + 1 :], before.out[row + 1 :])


@BOTH
def test_a_row_without_keys_or_without_a_tile_is_empty(implementation: str) -> None:
    scene, rows_of, spans_of = prefill_scene(5, Shape(num_requests=2))
    spans = span_list(scene, rows_of, spans_of, tile_rows=64)
    one_tile = replace(spans, num_tiles=torch.ones_like(spans.num_tiles))
    no_keys = replace(one_tile, request_span_indptr=torch.zeros_like(spans.request_span_indptr))
    for listed in (one_tile, no_keys):
        state = attended(scene, listed, implementation)
        padding = slice(len(rows_of[0]), None) if listed is one_tile else slice(None)
        assert (state.lse[padding] == -torch.inf).all()
        assert not state.out[padding].any()


@BOTH
def test_strides_are_free(implementation: str) -> None:
    scene, rows_of, spans_of = prefill_scene(6, Shape(num_requests=2))
    spans = span_list(scene, rows_of, spans_of, tile_rows=16)
    expected = attended(scene, spans, implementation)
    pool = torch.stack([scene.k_pages, scene.v_pages], 1)
    fused = torch.stack([scene.q, scene.q], -1)
    strided = replace(scene, q=fused[..., 1], k_pages=pool[:, 0], v_pages=pool[:, 1])
    actual = attended(strided, spans, implementation)
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)
