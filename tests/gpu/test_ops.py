"""The operators on a CUDA device: compiled kernels, real tile shapes, bf16; run by `make test-gpu`.

Same laws, scenes and budgets as under tests/ops, at larger sizes, and what only a GPU can show:
addresses past 2^31, replay of a captured graph, agreement of repeated runs.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.rotate import rotate
from looseleaf.ops.store_kv import store_kv
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget, assert_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Scene, Shape, rotation_table, turned_at

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGE = Shape(
    device="cuda",
    dtype=BF16,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=128,
    longest_document=700,
    longest_tail=100,
    num_requests=6,
    most_rows=80,
)
EVERYTHING = replace(
    LARGE, masks=True, patches=True, soft_cap=5.0, window=300, alibi=True, rotary_dim=48
)
# interleaved, fewer angles than dims, other page sizes and head dims ride along with the features
VARIANTS = {
    "bf16-gqa": LARGE,
    "bf16-mha-64": replace(LARGE, num_qo_heads=4, num_kv_heads=4, head_dim=64, page_size=32),
    "bf16-mqa-80-partial": replace(
        LARGE, num_qo_heads=7, num_kv_heads=1, head_dim=80, rotary_dim=32, page_size=64
    ),
    "bf16-256-soft-cap": replace(LARGE, head_dim=256, soft_cap=3.0, softmax_scale=0.3),
    "bf16-96-window-interleaved": replace(LARGE, head_dim=96, window=150, interleaved=True),
    "bf16-alibi": replace(LARGE, head_dim=64, rotary_dim=0, alibi=True),
    "bf16-32-masks-patches": replace(LARGE, head_dim=32, masks=True, patches=True),
    "bf16-everything": EVERYTHING,
    "fp16-gqa": replace(LARGE, dtype=FP16),
    "fp16-everything": replace(EVERYTHING, dtype=FP16, head_dim=64),
    "fp32-gqa": replace(LARGE, dtype=FP32),
    "fp32-256-everything": replace(EVERYTHING, dtype=FP32, head_dim=256, interleaved=True),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def attended(scene: Scene, work: WorkList, carried: AttnState | None = None) -> AttnState:
    """Partial states and their merge, the output in the dtype of the query."""
    with poisoned():
        states = partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
            scene.slot_positions, "triton",
        )  # fmt: skip
        out = torch.empty_like(scene.q)
        return merge_states(states, work.row_state_indptr, carried, out, implementation="triton")


@EVERY_VARIANT
def test_decode_attends_within_the_budget_grouped_or_not(variant: str) -> None:
    scene = SceneBuilder(1, VARIANTS[variant]).decode()
    dtype = scene.shape.dtype
    truth, plain = dense_attention(scene), plain_attention(scene)
    for grouped, pages in [(True, None), (False, 7)]:
        work = work_list(scene, grouped=grouped, pages_per_item=pages)
        assert_state_within_budget(attended(scene, work), truth, plain, dtype)


@EVERY_VARIANT
def test_prefill_attends_within_the_budget(variant: str) -> None:
    scene, rows_of, spans_of = SceneBuilder(2, VARIANTS[variant]).prefill()
    dtype = scene.shape.dtype
    spans = span_list(scene, rows_of, spans_of, tile_rows=64)
    with poisoned():
        actual = prefill_attention(
            scene.q, scene.k_pages, scene.v_pages, spans, scene.rotation, scene.rule,
            scene.slot_positions, "triton",
        )  # fmt: skip
    assert actual.out.dtype == dtype
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(actual, truth, plain, dtype)


def test_pages_may_be_selected_per_kv_head() -> None:
    scene = SceneBuilder(3, replace(LARGE, per_head=True)).decode()
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(attended(scene, work_list(scene)), truth, plain, BF16)


def test_an_item_may_have_hundreds_of_rows() -> None:
    scene = SceneBuilder(4, replace(LARGE, num_requests=200, num_documents=1)).decode()
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(attended(scene, work_list(scene)), truth, plain, BF16)


def test_a_row_may_start_from_a_carried_state() -> None:
    """What one half of the readings gives is carried into the other half."""
    scene = SceneBuilder(5, LARGE).decode()
    truth, plain = dense_attention(scene), plain_attention(scene)
    half = len(scene.readings) // 2
    carried = attended_in_fp32(replace(scene, readings=scene.readings[:half]))
    rest = replace(scene, readings=scene.readings[half:])
    assert_state_within_budget(attended(rest, work_list(rest), carried), truth, plain, BF16)


def attended_in_fp32(scene: Scene) -> AttnState:
    work = work_list(scene)
    states = partial_attention(
        scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
        scene.slot_positions, "triton",
    )  # fmt: skip
    return merge_states(states, work.row_state_indptr, implementation="triton")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("page_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rotated_and_stored_within_the_budget(
    dtype: torch.dtype, page_dtype: torch.dtype, interleaved: bool
) -> None:
    fused = torch.randn(300, 16, 96, device="cuda").to(dtype)
    k, v = fused.split(8, 1)
    frequencies = 0.8 ** torch.arange(32, dtype=torch.float64, device="cuda")
    table = rotation_table(frequencies, 4096, interleaved)
    positions = torch.randint(0, 4096, (300,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(32 * 16, device="cuda")[:300].int()
    slots[::7] = -1
    k_pages = torch.full((32, 8, 16, 96), torch.nan, device="cuda", dtype=page_dtype)
    v_pages = k_pages.clone()
    store_kv(k, v, positions, slots, table, k_pages, v_pages, "triton")
    with poisoned():
        turned = rotate(k, positions, table, "triton")

    truth = turned_at(k.double(), positions, frequencies, interleaved)
    plain = turned_at(k.float(), positions, frequencies, interleaved)
    assert_within_budget(turned, truth, plain.to(dtype), dtype)
    kept = slots >= 0
    page, slot = slots[kept].long() // 16, slots[kept].long() % 16
    assert_within_budget(
        k_pages[page, :, slot], truth[kept], plain[kept].to(page_dtype), page_dtype
    )
    assert torch.equal(v_pages[page, :, slot], v[kept].to(page_dtype))
    assert k_pages.isnan().sum() == v_pages.isnan().sum() == k_pages.numel() - kept.sum() * 8 * 96


def test_addresses_go_past_two_to_the_31() -> None:
    """Pages at the end of a pool of more than 2^31 numbers are found by all that take pages."""
    builder = SceneBuilder(6, LARGE)
    scene, rows_of, spans_of = builder.prefill()
    pages, *inner = scene.k_pages.shape
    capacity = 2**31 // scene.k_pages[0].numel() + pages + 1
    shift = capacity - pages
    pools = [torch.zeros(capacity, *inner, dtype=BF16, device="cuda") for _ in range(2)]
    truth, plain = dense_attention(scene), plain_attention(scene)
    for segment in builder.segments:
        segment.pages = [page + shift for page in segment.pages]
        at = torch.arange(segment.length, device="cuda")
        slots = torch.tensor(segment.pages, device="cuda")[at // 16] * 16 + at % 16
        store_kv(segment.k, segment.v, segment.positions, slots, scene.rotation, *pools, "triton")
    there = ~scene.k_pages.isnan()
    torch.testing.assert_close(pools[0][shift:][there], scene.k_pages[there])
    spans = span_list(scene, rows_of, spans_of, tile_rows=64)
    state = prefill_attention(scene.q, *pools, spans, scene.rotation, scene.rule, None, "triton")
    assert_state_within_budget(state, truth, plain, BF16)
    unread = scene.slot_positions.new_zeros(capacity, 16)
    far = replace(scene, k_pages=pools[0], v_pages=pools[1], slot_positions=unread)
    assert_state_within_budget(attended(far, work_list(far)), truth, plain, BF16)


def test_repeated_runs_agree_bit_for_bit() -> None:
    scene = SceneBuilder(7, EVERYTHING).decode()
    work = work_list(scene, pages_per_item=5)
    first, second = attended(scene, work), attended(scene, work)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


def test_a_captured_step_replays_over_new_lists() -> None:
    """Launchers read no counts on the host: one graph serves every list that fits its capacity."""
    scenes = [SceneBuilder(seed, LARGE).decode() for seed in (8, 9)]
    lists = [work_list(scene, pages_per_item=4) for scene in scenes]
    rows = max(len(scene.row_positions) for scene in scenes)
    static = Capacity(scenes[0], lists[0], scenes[1], lists[1], rows)

    # positions differ from scene to scene, angles do not
    rotation = max((scene.rotation for scene in scenes), key=lambda table: len(table.cos))

    def step() -> AttnState:
        states = partial_attention(
            static.q, static.k_pages, static.v_pages, static.work, rotation,
            scenes[0].rule, None, "triton",
        )  # fmt: skip
        return merge_states(states, static.work.row_state_indptr, implementation="triton")

    replay, result = captured(step)
    for scene, work in zip(scenes, lists, strict=True):
        static.load(scene, work)
        replay()
        count = len(scene.row_positions)
        state = AttnState(result.out[:count].to(BF16), result.lse[:count])
        truth, plain = dense_attention(scene), plain_attention(scene)
        assert_state_within_budget(state, truth, plain, BF16)
        assert (result.lse[count:] == -torch.inf).all()


def captured(step: Callable[[], AttnState]) -> tuple[Callable[[], None], AttnState]:
    """A graph of one step, after a first one that compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


class Capacity:
    """Tensors of fixed capacity that hold one of two scenes at a time."""

    def __init__(
        self, one: Scene, one_work: WorkList, other: Scene, other_work: WorkList, rows: int
    ) -> None:
        pages = max(len(one.k_pages), len(other.k_pages))
        self.q = one.q.new_zeros(rows + 2, *one.q.shape[1:])
        self.k_pages = one.k_pages.new_zeros(pages, *one.k_pages.shape[1:])
        self.v_pages = torch.zeros_like(self.k_pages)
        capacity = {
            f.name: max(len(getattr(w, f.name)) for w in (one_work, other_work)) + 2
            for f in fields(WorkList)
            if isinstance(getattr(one_work, f.name), torch.Tensor)
        }
        capacity["num_items"], capacity["row_state_indptr"] = 1, rows + 3
        self.work = WorkList(
            **{
                n: torch.zeros(size, dtype=torch.int32, device="cuda")
                for n, size in capacity.items()
            }
        )

    def load(self, scene: Scene, work: WorkList) -> None:
        """Copy in place; rows past the scene's have no states."""
        self.q[: len(scene.q)] = scene.q
        self.k_pages[: len(scene.k_pages)] = scene.k_pages
        self.v_pages[: len(scene.v_pages)] = scene.v_pages
        for field in fields(WorkList):
            source, target = getattr(work, field.name), getattr(self.work, field.name)
            if isinstance(source, torch.Tensor):
                target[: len(source)] = source
        self.work.row_state_indptr[len(work.row_state_indptr) :] = work.row_state_indptr[-1]
