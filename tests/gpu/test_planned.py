"""Steps as the planner plans them, on a CUDA device: every shape within the budget of its data,
and in batch-invariant mode the same bits whoever is in the batch."""

from dataclasses import replace

import pytest
import torch

from looseleaf.attention.buffers.span_buffer import SpanBuffer
from looseleaf.graphs.prefill import capacity_for
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import Tile, WorkList, partial_attention
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.prefill_attention.units import UnitCosts
from looseleaf_lab.bench.attention import AttentionConfig, Bench
from looseleaf_lab.bench.attention_cases import (
    AttentionShape,
    Case,
    after_documents,
    causal,
    private,
    ragged,
    shared,
)
from looseleaf_lab.bench.attention_check import Truth, check
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import in_units, planned, span_list, work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Shape

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

HEADS = {
    "mha": (8, 8),
    "gqa-3": (24, 8),
    "gqa-4": (32, 8),
    "gqa-7": (28, 4),
    "gqa-8": (32, 4),
}


def attention_shape(heads: str, head_dim: int, page_size: int = 16) -> AttentionShape:
    return AttentionShape(*HEADS[heads], head_dim, page_size, layers=1)


def bench_of(case: Case, shape: AttentionShape) -> Bench:
    torch.manual_seed(0)
    return Bench(AttentionConfig(shape), case.num_pages, case.longest)


def assert_right(case: Case, shape: AttentionShape) -> None:
    """The rows that `check` samples are within their budget, planned in every way there is."""
    bench = bench_of(case, shape)
    truth = Truth(bench.pools[0], bench.rotation, bench.rule)
    q = bench.query(case)
    for options in ({}, {"grouping": False}, {"invariant": True}):
        plan = bench.plan(case, **options)
        with poisoned():
            assert check(case, q, bench.layer(q, plan, 0, bench.rotation), truth) <= 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_rows_of_any_number_behind_a_shared_segment_are_within_the_budget(
    heads: str, head_dim: int, rows: int
) -> None:
    shape = attention_shape(heads, head_dim)
    assert_right(shared(shape, rows, 1000, tail=37, spread=5), shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
def test_ragged_and_private_rows_and_prompts_are_within_the_budget(
    heads: str, head_dim: int
) -> None:
    shape = attention_shape(heads, head_dim)
    for case in (
        ragged(shape, 40, 300, seed=1),
        private(shape, 7, 777),
        causal(shape, 500),
        after_documents(shape, 70, 3, 333),
        after_documents(shape, 900, 3, 333),
    ):
        assert_right(case, shape)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages_may_have_any_size(page_size: int) -> None:
    shape = attention_shape("gqa-4", 128, page_size)
    assert_right(ragged(shape, 33, 500, seed=2), shape)
    assert_right(after_documents(shape, 600, 2, 300), shape)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_batch_invariant_rows_have_the_same_bits_grouped_or_not_and_alone(head_dim: int) -> None:
    shape = attention_shape("gqa-4", head_dim)
    case = ragged(shape, 24, 2300, seed=3)
    bench = bench_of(case, shape)
    q = bench.query(case)

    def answers(of: Case, rows: torch.Tensor, *, grouping: bool) -> torch.Tensor:
        plan = bench.plan(of, grouping=grouping, invariant=True)
        return bench.layer(rows, plan, 0, bench.rotation)

    together = answers(case, q, grouping=True)
    assert torch.equal(together, answers(case, q, grouping=False))
    for row in (0, 11, 23):
        alone = replace(case, rows=case.rows[row : row + 1])
        out = answers(alone, q[row : row + 1].clone(), grouping=False)
        assert torch.equal(out[0], together[row])


def test_rows_of_a_prompt_have_the_same_bits_however_many_tiles_a_program_is_dealt() -> None:
    """400 units for 132 programs, then 32: of an H100, or of another in another number."""
    shape = attention_shape("gqa-4", 128)
    case = causal(shape, 1600)
    bench = bench_of(case, shape)
    q = bench.query(case)
    with poisoned():
        together = bench.layer(q, bench.plan(case, invariant=True), 0, bench.rotation)
    for first in range(0, 1600, 128):
        rows = range(first, min(first + 128, 1600))
        few = replace(case, chunks=(replace(case.chunks[0], positions=rows),))
        own = q[rows.start : rows.stop]
        alone = bench.layer(own, bench.plan(few, invariant=True), 0, bench.rotation)
        assert torch.equal(alone, together[rows.start : rows.stop])


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("per_head", [False, True])
def test_planned_tiles_read_nothing_that_no_row_sees(block_m: int, per_head: bool) -> None:
    """Pages hold NaN wherever no row sees a key."""
    shape = Shape(
        device="cuda",
        dtype=torch.bfloat16,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=128,
        longest_document=700,
        longest_tail=100,
        num_requests=9,
        per_head=per_head,
    )
    scene = SceneBuilder(11, shape).decode()
    work = tiled(work_list(scene), block_m)
    with poisoned():
        states = partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule
        )
        out = torch.empty_like(scene.q)
        actual = merge_states(states, work.row_state_indptr, out=out)
    truth, plain = dense_attention(scene), plain_attention(scene)
    assert_state_within_budget(actual, truth, plain, shape.dtype)


@pytest.mark.parametrize("new", [1, 40, 200, 700])
def test_a_list_at_fixed_addresses_is_read_as_it_is(new: int) -> None:
    """Parts of tiles and whole ones, in room for more; rows of padding get the empty state."""
    shape = attention_shape("gqa-4", 128)
    case = after_documents(shape, new, 3, 1300)
    bench = bench_of(case, shape)
    q = bench.query(case)
    spans = bench.planner.host_spans(case.chunks)
    assert bool(spans.num_states) == (new < 500)
    rows = new + 9
    buffer = SpanBuffer(capacity_for(spans, rows), q.device)
    padded = torch.cat([q, q[:1].expand(9, -1, -1)])
    args = *bench.pools[0], bench.planner.span_list(case.chunks), bench.rotation, bench.rule
    wanted = prefill_attention(q, *args)
    for _ in range(2):
        buffer.load(spans)
        buffer.fetch()
        with poisoned():
            got = prefill_attention(padded, *args[:2], buffer.spans, *args[3:])
        assert torch.equal(got.out[:new], wanted.out)
        assert torch.equal(got.lse[:new], wanted.lse)
        assert not got.out[new:].any()
        assert got.lse[new:].isneginf().all()
    check(case, q, wanted.out, Truth(bench.pools[0], bench.rotation, bench.rule))


def tiled(work: WorkList, block_m: int) -> WorkList:
    """All items by one tile, as a planner would have them launched."""
    return planned(work, Tile(block_m, 64, 4, 2, 1))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_rows_around_replaced_tokens_are_within_the_budget(head_dim: int, page_size: int) -> None:
    """By the kernel of the generation, which is told how much of a patch each row sees."""
    shape = Shape(
        device="cuda",
        dtype=torch.bfloat16,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        longest_document=700,
        longest_tail=100,
        most_rows=300,
        num_requests=9,
        masks=True,
        patches=True,
    )
    scene, rows_of, spans_of = SceneBuilder(12, shape).prefill()
    bounds = torch.zeros(len(scene.q), dtype=torch.int32, device="cuda")
    for rows, placements in zip(rows_of, spans_of, strict=True):
        for placement in placements:
            segment = placement.segment
            if segment.explicit:
                at = torch.tensor(scene.row_positions, device="cuda")[rows] - placement.offset
                bounds[rows] = torch.searchsorted(segment.positions, at, right=True).int()
            # what is replaced has been a number
            hidden = torch.tensor(sorted(placement.hidden), dtype=torch.long)
            pages = torch.tensor(segment.pages)[hidden // page_size].cuda()
            for held in (scene.k_pages, scene.v_pages):
                there = held[pages, :, (hidden % page_size).cuda()]
                held[pages, :, (hidden % page_size).cuda()] = there.nan_to_num(1.0)
    truth, plain = dense_attention(scene), plain_attention(scene)
    spans = span_list(scene, rows_of, spans_of, tile_rows=32, slack=0)
    known = replace(spans, row_patch_bounds=bounds)
    # units cost nothing but their blocks, and there is room for many: all tiles are cut
    cut = in_units(known, 2, UnitCosts(4096, 0.0, 1.0, 0.0, 0.0, 0.0))
    assert cut.num_states > len(scene.q)
    # of programs of one computing group a tile has half as many rows
    fewer = span_list(scene, rows_of, spans_of, tile_rows=16, slack=0)
    one_group = in_units(replace(fewer, row_patch_bounds=bounds), 2, None, 1)
    cut_one = in_units(
        replace(fewer, row_patch_bounds=bounds), 2, UnitCosts(4096, 0.0, 1.0, 0.0, 0.0, 0.0), 1
    )
    for told in (in_units(known, 2, None), cut, one_group, cut_one, spans):
        with poisoned():
            actual = prefill_attention(
                scene.q, scene.k_pages, scene.v_pages, told, scene.rotation, scene.rule,
                scene.slot_positions, "triton",
            )  # fmt: skip
        assert_state_within_budget(actual, truth, plain, torch.bfloat16)
