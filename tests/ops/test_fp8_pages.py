"""Laws of pages of e4m3: stored with saturation and rounded once, read as what was stored."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import FP8, FP8_LARGEST, to_pages
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.partial_attention.native import NativePlan, Phase, load_attention
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.store_kv import store_kv
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.oracle import dense_attention
from looseleaf_lab.testing.scene import Scene, Shape, rotation_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FREQUENCIES = 0.9 ** torch.arange(16, dtype=torch.float64, device=DEVICE)
SHAPES = {
    "gqa": Shape(head_dim=32),
    "page-size-32": Shape(head_dim=64, page_size=32, num_kv_heads=1),
    "masks-patches": Shape(head_dim=32, masks=True, patches=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
DECODERS = ["reference", "triton"] + (["cpu", "native"] if DEVICE == "cpu" else [])


def every_code() -> Tensor:
    """All finite numbers of e4m3, as fp32."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return codes[codes.isfinite()]


def hard_numbers() -> Tensor:
    """Numbers at, between and beside those of e4m3, and beyond the largest: ``[tokens, 32]``."""
    exact = every_code().sort().values
    halfway = (exact[1:] + exact[:-1]) / 2
    beside = torch.cat([halfway * (1 + 2**-20), halfway * (1 - 2**-20)])
    beyond = torch.tensor([448.1, 463.9, 464.0, 465.0, 1e4, 3e38, -449.0, -1e30])
    numbers = torch.cat([exact, halfway, beside, beyond])
    drawn = torch.randn(-len(numbers) % 32, generator=torch.Generator().manual_seed(0))
    return torch.cat([numbers, drawn]).view(-1, 32)


def stored_values(implementation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What was to be stored as values, ``[tokens, 1, 32]``, and the pages that hold it."""
    v = hard_numbers().to(DEVICE, dtype)[:, None]
    count = len(v)
    k_pages = torch.zeros(-(-count // 16), 1, 16, 32, device=DEVICE).to(FP8)
    v_pages = k_pages.clone()
    slots = torch.arange(count, device=DEVICE)
    table = rotation_table(FREQUENCIES, 4, False)
    where = torch.zeros_like(slots), slots
    if implementation == "native":
        plan = NativePlan(table, _rule(), 1, k_pages, row_dtype=dtype)
        plan.point_rows(slots, where[0])
        plan.run(Phase.STORE, kv=(v, v), pages=plan.find_pages(k_pages, v_pages))
    else:
        store_kv(v, v, *where, table, k_pages, v_pages, implementation)  # type: ignore[arg-type]
    flat = v_pages.transpose(1, 2).reshape(-1, 1, 32)[:count]
    turned = k_pages.transpose(1, 2).reshape(-1, 1, 32)[:count]
    # at position 0 nothing turns
    assert torch.equal(turned.view(torch.uint8), flat.view(torch.uint8))
    return v, flat


def _rule():  # type: ignore[no-untyped-def]
    return SceneBuilder(0, Shape(num_qo_heads=1, num_kv_heads=1, head_dim=32)).decode().rule


# the interpreter rounds halves up, and 31 to 16: there only what is exact, or too large, is held
# against the others
STORERS = ["reference", "triton" if DEVICE == "cuda" else "native"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", STORERS)
def test_numbers_are_stored_as_the_nearest_and_saturate(
    implementation: str, dtype: torch.dtype
) -> None:
    v, pages = stored_values(implementation, dtype)
    held = pages.float()
    assert held.isfinite().all()
    codes = every_code().to(DEVICE)
    nearest = (codes - v.float().clamp(-FP8_LARGEST, FP8_LARGEST)[..., None]).abs().amin(-1)
    off = (held - v.float().clamp(-FP8_LARGEST, FP8_LARGEST)).abs()
    assert torch.equal(off, nearest)
    # of two that are as near, the even one
    assert torch.equal(held, to_pages(v.float().cpu(), FP8).float().to(DEVICE))


def test_the_kernel_stores_what_is_exact_and_what_is_too_large() -> None:
    v, pages = stored_values("triton", torch.float32)
    expected = to_pages(v.cpu(), FP8).float().to(DEVICE)
    certain = (expected == v) | (v.abs() > FP8_LARGEST)
    assert certain.sum() > 250
    assert torch.equal(pages.float()[certain], expected[certain])


def narrowed(scene: Scene) -> tuple[Scene, Scene]:
    """The scene with pages of e4m3, and with what those hold in fp32."""
    pages = [to_pages(pages, FP8) for pages in (scene.k_pages, scene.v_pages)]
    wide = [page.float() for page in pages]
    return (
        replace(scene, k_pages=pages[0], v_pages=pages[1]),
        replace(scene, k_pages=wide[0], v_pages=wide[1]),
    )


def decoded(scene: Scene, implementation: str) -> AttnState:
    work = work_list(scene)
    states = partial_attention(
        scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
        scene.slot_positions, implementation,  # type: ignore[arg-type]
    )  # fmt: skip
    return merge_states(states, work.row_state_indptr, implementation="reference")


def zeros_for_nan(scene: Scene) -> Scene:
    """The CPU path needs finite pages, as a pool has them."""
    k_pages, v_pages = scene.k_pages.float().nan_to_num(), scene.v_pages.float().nan_to_num()
    return replace(scene, k_pages=k_pages, v_pages=v_pages)


@EVERY_SHAPE
@pytest.mark.parametrize("implementation", DECODERS)
def test_decode_reads_what_the_pages_hold(shape: Shape, implementation: str) -> None:
    scene = SceneBuilder(1, replace(shape, device=DEVICE)).decode()
    truth = dense_attention(scene)
    if implementation == "cpu":
        scene = zeros_for_nan(scene)
    narrow, wide = narrowed(scene)
    expected, actual = decoded(wide, "reference"), decoded(narrow, implementation)
    torch.testing.assert_close(tuple(actual), tuple(expected))
    # against what was rounded away: no more than twice what rounding alone explains
    assert_state_within_budget(actual, truth, expected, torch.float32)


@EVERY_SHAPE
@pytest.mark.parametrize("implementation", ["reference", "triton", "cpu"])
def test_prefill_reads_what_the_pages_hold(shape: Shape, implementation: str) -> None:
    if implementation == "cpu" and DEVICE != "cpu":
        pytest.skip("for tensors on the CPU")
    scene, rows_of, spans_of = SceneBuilder(2, replace(shape, device=DEVICE)).prefill()
    if implementation == "cpu":
        scene = zeros_for_nan(scene)
    spans = span_list(scene, rows_of, spans_of, tile_rows=16)
    answers = []
    for one, chosen in zip(narrowed(scene), (implementation, "reference"), strict=True):
        answers.append(
            prefill_attention(
                one.q, one.k_pages, one.v_pages, spans, one.rotation, one.rule,
                one.slot_positions, chosen,  # type: ignore[arg-type]
            )
        )  # fmt: skip
    torch.testing.assert_close(tuple(answers[0]), tuple(answers[1]))


def test_the_error_of_attention_over_random_keys_is_three_percent() -> None:
    """Keys and values are rounded by up to 1/16, on average by a sixth of that: what softmax and
    sum leave of it, measured; the figure of the documentation."""
    scene = SceneBuilder(3, Shape(head_dim=64, longest_document=400, device=DEVICE)).decode()
    truth = dense_attention(scene).out
    error = (decoded(narrowed(scene)[0], "reference").out - truth).norm() / truth.norm()
    assert 0.01 < float(error) < 0.05


@pytest.mark.skipif(DEVICE != "cpu", reason="for tensors on the CPU")
def test_c_kernels_know_which_dtypes_go_together() -> None:
    pages = torch.zeros(2, 2, 16, 32)
    table = rotation_table(FREQUENCIES, 4, False)
    with pytest.raises(NativeUnavailable, match=r"float32 over pages of torch\.bfloat16"):
        load_attention(pages.bfloat16(), 4, table, torch.float32)
