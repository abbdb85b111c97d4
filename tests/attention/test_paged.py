"""One step of attention is the same whoever computes it: references, the CPU path, the kernels."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import RopeConfig
from looseleaf.kv.pool import PagePool
from looseleaf.ops.dispatch import Implementation
from looseleaf.rope import build_rotation
from looseleaf.types import ScoreRule
from tests.attention.forests import PAGE_SIZE, STEPS, RowRecipe, StepRecipe, decode_rows, spans_of

NUM_PAGES, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 128, 4, 2, 32
FULL, WINDOW = ScoreRule(HEAD_DIM**-0.5), ScoreRule(HEAD_DIM**-0.5, window=11)
SOFT_CAP = ScoreRule(HEAD_DIM**-0.5, soft_cap=2.0)
SINKS = replace(FULL, sinks=torch.tensor([1.0, -1.0, 3.0, 0.0]))
WINDOW_SINKS = replace(WINDOW, sinks=torch.tensor([2.0, 0.5, -3.0, 4.0]))
ALIBI = ScoreRule(HEAD_DIM**-0.5, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05]))


def slot(span: ReadSpan, index: int) -> int:
    return span.pages[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE


def mixed_step(recipe: StepRecipe, num_computed: int, new: int, num_decode_rows: int) -> StepRows:
    """Some rows decode; the others are requests that read a chunk of text and one of a document."""
    every = decode_rows(recipe)
    rows, places = every[:num_decode_rows], []
    for row in rows:
        last = row.tail.length - 1
        places.append((slot(row.tail, last), last))
    chunks, page = [], 1 + max(max(span.pages) for row in every for span in spans_of(row))
    for row in every[num_decode_rows:]:
        own_pages = range(page, page + -(-(num_computed + new) // PAGE_SIZE))
        text = ReadSpan(own_pages, row.tail.offset, num_computed + new, 0)
        page = own_pages.stop
        own_pages = range(page, page + -(-new // PAGE_SIZE))
        document = ReadSpan(own_pages, row.settled[0].length, new, 0)
        page = own_pages.stop
        for spans, first in (((*row.settled, text), num_computed), ((row.settled[0], document), 0)):
            start = spans[-1].offset
            chunks.append(PrefillChunk(range(start + first, start + spans[-1].length), spans))
            places += [(slot(spans[-1], n), n) for n in range(first, spans[-1].length)]
    slots, frame_positions = torch.tensor(places, dtype=torch.int64).T
    return StepRows(rows, chunks, slots, frame_positions)


def outputs(
    step: StepRows,
    rules: tuple[ScoreRule, ...],
    implementation: Implementation,
    *,
    grouping: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What every layer answers to the same random queries, and the pages afterwards."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    pool = PagePool(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_layers=len(rules),
        num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool.kv.copy_(normal(*pool.kv.shape))
    ropes = (RopeConfig(HEAD_DIM, HEAD_DIM, theta=10.0**n) for n in range(4, 4 + len(rules)))
    attention = PagedAttention(
        pool,
        tuple(build_rotation(rope, 512) for rope in ropes),
        rules,
        NUM_QO_HEADS,
        grouping=grouping,
        implementation=implementation,
    )
    attend = attention.step(step)
    q = normal(len(step.slots), NUM_QO_HEADS, HEAD_DIM)
    k, v = (normal(len(step.slots), NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    *earlier, last = range(len(rules))
    answers = [attend(layer, q, k, v) for layer in earlier]
    # what is left in the last layer stands where the row stood; the rest is not asked for
    numbers = range(len(q)) if step.logit_rows is None else step.logit_rows
    answered = torch.zeros_like(q)
    answered[list(numbers)] = attend(last, q[list(numbers)], k, v)
    return torch.stack([*answers, answered]), pool.kv


@settings(max_examples=25)
@given(
    recipe=STEPS,
    num_computed=st.integers(0, 20),
    new=st.integers(1, 20),
    num_decode_rows=st.integers(0, 6),
    rules=st.sampled_from(
        [(FULL, WINDOW), (FULL, FULL), (SOFT_CAP,), (ALIBI,), (SINKS, WINDOW_SINKS, FULL)]
    ),
)
def test_a_mixed_step_is_the_same_on_the_cpu_path_as_by_the_references(
    recipe: StepRecipe,
    num_computed: int,
    new: int,
    num_decode_rows: int,
    rules: tuple[ScoreRule, ...],
) -> None:
    step = mixed_step(recipe, num_computed, new, num_decode_rows)
    expected, pages = outputs(step, rules, "reference")
    for implementation in ("cpu", "native", "auto"):
        actual, written = outputs(step, rules, implementation)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(written, pages)


@settings(max_examples=20)
@given(recipe=STEPS, implementation=st.sampled_from(["cpu", "native", "reference"]))
def test_grouping_does_not_change_a_step(
    recipe: StepRecipe, implementation: Implementation
) -> None:
    """Law 3 for a whole step."""
    step = mixed_step(recipe, 3, 9, len(recipe.rows))
    rules = FULL, WINDOW, WINDOW_SINKS
    expected, _ = outputs(step, rules, implementation, grouping=False)
    actual, _ = outputs(step, rules, implementation)
    torch.testing.assert_close(actual, expected)


@settings(max_examples=25)
@given(
    recipe=STEPS,
    num_decode_rows=st.integers(0, 6),
    rules=st.sampled_from([(FULL, WINDOW), (FULL,), (FULL, SINKS)]),
    implementation=st.sampled_from(["cpu", "native", "reference"]),
    data=st.data(),
)
def test_the_last_layer_answers_the_rows_that_are_asked_for_and_stores_all(
    recipe: StepRecipe,
    num_decode_rows: int,
    rules: tuple[ScoreRule, ...],
    implementation: Implementation,
    data: st.DataObject,
) -> None:
    step = mixed_step(recipe, 3, 9, num_decode_rows)
    expected, pages = outputs(step, rules, implementation)
    new = range(len(step.decode), len(step.slots))
    subset = data.draw(st.sets(st.sampled_from(new)) if new else st.just(set()))
    numbers = [*range(len(step.decode)), *sorted(subset)]
    actual, written = outputs(replace(step, logit_rows=numbers), rules, implementation)
    torch.testing.assert_close(actual[:-1], expected[:-1])
    torch.testing.assert_close(actual[-1, numbers], expected[-1, numbers])
    torch.testing.assert_close(written, pages)


RECIPE = StepRecipe(
    [20, 5, 33],
    [
        RowRecipe([0, 1], 1, [0, 2], [2], 3),
        RowRecipe([0], 1, [2, 0], [2, 3], 15),
        RowRecipe([0, 1], 0, [1], [], 0),
        RowRecipe([], 1, [0, 1, 0], [3], 7),
    ],
)


def test_the_kernels_give_the_same_step() -> None:
    step, rules = mixed_step(RECIPE, 3, 9, 2), (FULL, WINDOW_SINKS)
    expected, pages = outputs(step, rules, "reference")
    actual, written = outputs(step, rules, "triton")
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(written, pages)
    logit_rows = [0, 1, 10, 19]
    answered, written = outputs(replace(step, logit_rows=logit_rows), rules, "triton")
    torch.testing.assert_close(answered[-1, logit_rows], expected[-1, logit_rows])
    torch.testing.assert_close(written, pages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_cpu_path_stays_within_a_few_roundings(dtype: torch.dtype) -> None:
    step = mixed_step(RECIPE, 3, 9, 2)
    for rules in ((FULL, WINDOW), (SOFT_CAP,), (ALIBI,), (SINKS,)):
        expected, _ = outputs(step, rules, "reference", dtype=dtype)
        # two roundings on either side: of the turned query and of the output
        band = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
        for implementation in ("cpu", "native"):
            actual, _ = outputs(step, rules, implementation, dtype=dtype)  # type: ignore[arg-type]
            assert actual.dtype == dtype
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=band)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_c_path_rounds_its_output_to_the_nearest(dtype: torch.dtype) -> None:
    """With a scale of 0 the output is the mean of the values: of two, exact until rounded."""
    pool = PagePool(
        num_pages=2, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(0)))
    rotation = build_rotation(RopeConfig(HEAD_DIM, HEAD_DIM), 512)
    attention = PagedAttention(
        pool, (rotation,), (ScoreRule(0.0),), NUM_QO_HEADS, implementation="native"
    )
    row = DecodeRow(1, (), ReadSpan([0], 0, 2, 0))
    attend = attention.step(StepRows([row], [], torch.tensor([1]), torch.tensor([1])))
    q, k = torch.randn(1, NUM_QO_HEADS, HEAD_DIM), torch.randn(1, NUM_KV_HEADS, HEAD_DIM)
    out = attend(0, q.to(dtype), k.to(dtype), k.to(dtype))
    values = pool.layer(0)[1][0, :, :2].float()
    mean = (values.sum(1) / 2).to(dtype).repeat_interleave(NUM_QO_HEADS // NUM_KV_HEADS, 0)
    assert torch.equal(out[0], mean)
