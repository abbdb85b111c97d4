"""What a row sees and is not a number makes its answer NaN, whoever computes it, and also merged.

A damaged page must not end as a fluent answer without it.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.partial_attention.native import NativePlan, Phase
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.types import AttnState, ScoreRule
from tests.ops.small_lists import angles, int32, one_item, one_span

HEADS, DIM = 2, 32
RULE, TURN = ScoreRule(DIM**-0.5), angles(128, DIM)
EVERYWHERE = pytest.mark.parametrize("implementation", ["reference", "cpu", "native", "triton"])
IN_C = pytest.mark.parametrize("rows", [1, 9])


def spoiled() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """A query and pages, of which page 1 or the query holds a NaN that a row sees."""
    torch.manual_seed(5)
    q, (k, v) = torch.randn(9, 4, DIM), torch.randn(2, 4, HEADS, 16, DIM)
    for what in ("key", "value", "last value", "query", "all keys"):
        bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
        if what == "key":
            bad_k[1, :, 3, 7] = torch.nan
        elif what == "all keys":
            bad_k[1] = torch.nan
        elif what == "query":
            bad_q[:] = torch.nan
        else:
            bad_v[1, :, 11 if what == "last value" else 0] = torch.nan
        yield what, bad_q, bad_k, bad_v


def rows_of(count: int, bound: int = 12) -> list[tuple[int, int]]:
    return [(40 + n, bound) for n in range(count)]


@EVERYWHERE
@IN_C
def test_a_state_of_what_is_no_number_is_none(implementation: Implementation, rows: int) -> None:
    for what, q, k, v in spoiled():
        state = partial_attention(
            q[:rows], k, v, one_item([1], [0], rows_of(rows)), TURN, RULE,
            implementation=implementation,
        )  # fmt: skip
        assert state.out.isnan().any(-1).all(), what
        if "value" not in what:
            assert state.lse.isnan().all(), what


@EVERYWHERE
def test_a_merge_keeps_what_is_no_number(implementation: Implementation) -> None:
    for what, q, k, v in spoiled():
        states = [
            partial_attention(
                q[:1], k, v, one_item([page], [0], rows_of(1)), TURN, RULE,
                implementation=implementation,
            )
            for page in (1, 2)
        ]  # fmt: skip
        both = AttnState(*(torch.cat(pair) for pair in zip(*states, strict=True)))
        for how in ("reference", "triton"):
            merged = merge_states(both, int32(0, 2), implementation=how)
            assert merged.out.isnan().any(-1).all(), (what, how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@IN_C
def test_c_merges_what_is_no_number(dtype: torch.dtype, rows: int) -> None:
    for what, q, k, v in spoiled():
        # each row reads the damaged page and another, in items of its own
        works = [one_item([page], [0], rows_of(rows)) for page in (1, 2)]
        work = WorkList(
            num_items=int32(2),
            item_page_indptr=int32(0, 1, 2),
            item_entry_indptr=int32(0, rows, 2 * rows),
            item_kv_head=int32(-1, -1),
            item_explicit=int32(0, 0),
            page_indices=int32(1, 2),
            page_positions=int32(0, 0),
            entry_row=torch.cat([each.entry_row for each in works]),
            entry_offset=torch.cat([each.entry_offset for each in works]),
            entry_bound=torch.cat([each.entry_bound for each in works]),
            entry_mask=torch.cat([each.entry_mask for each in works]),
            entry_state=torch.cat([2 * works[0].entry_row, 2 * works[0].entry_row + 1]),
            mask_words=int32(),
            row_positions=works[0].row_positions,
            row_state_indptr=int32(*range(0, 2 * rows + 1, 2)),
        )
        pages, out = (k.to(dtype), v.to(dtype)), torch.empty(rows, 4, DIM, dtype=dtype)
        plan = NativePlan(TURN, RULE, 4, pages[0], work=work)
        found = plan.find_pages(*pages)
        plan.run(Phase.PARTIAL | Phase.MERGE, q[:rows].to(dtype), out=out, pages=found)
        assert out.isnan().any(-1).all(), what


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
def test_new_rows_that_see_what_is_no_number_are_none(implementation: Implementation) -> None:
    for what, q, k, v in spoiled():
        # a document, then the rows themselves
        spans = one_span([[16, 17, 18]], [1, 2], 19)
        state = prefill_attention(q[:3], k, v, spans, TURN, RULE, implementation=implementation)
        assert state.out.isnan().any(-1).all(), what


# the interpreter widens the code of NaN to 480, so Triton is left out
@pytest.mark.parametrize("implementation", ["reference", "cpu", "native"])
@IN_C
def test_e4m3_that_is_no_number_is_none(implementation: Implementation, rows: int) -> None:
    for what, q, k, v in spoiled():
        state = partial_attention(
            q[:rows], to_pages(k, FP8), to_pages(v, FP8), one_item([1], [0], rows_of(rows)), TURN,
            RULE, implementation=implementation,
        )  # fmt: skip
        assert state.out.isnan().any(-1).all(), what


@IN_C
def test_every_code_of_e4m3_is_the_number_it_stands_for(rows: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    # one key a page: a row's answer is the value
    v = codes.view(8, 1, 1, DIM)
    k = to_pages(torch.zeros(8, 1, 1, DIM), FP8)
    q = torch.randn(rows, 1, DIM)
    for page in range(8):
        work = one_item([page], [0], rows_of(rows, bound=1))
        state = partial_attention(q, k, v, work, TURN, RULE, implementation="native")
        expected = codes.float().view(8, DIM)[page].expand(rows, 1, DIM)
        torch.testing.assert_close(state.out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", ["reference", "native", "triton"])
@IN_C
def test_what_no_row_of_an_item_sees_may_be_anything(
    implementation: Implementation, rows: int
) -> None:
    torch.manual_seed(6)
    q, (k, v) = torch.randn(rows, 4, DIM), torch.randn(2, 3, HEADS, 16, DIM)
    k[1, :, 12:], v[1, :, 12:] = torch.nan, torch.nan
    state = partial_attention(
        q, k, v, one_item([1], [0], rows_of(rows)), TURN, RULE, implementation=implementation
    )
    assert state.out.isfinite().all()


@IN_C
def test_c_sees_what_weighs_nothing_beside_other_keys(rows: int) -> None:
    # the score of key 0 is so much lower that its weight is 0: its value is seen all the same
    k, v = torch.zeros(2, 1, 16, DIM), torch.randn(2, 1, 16, DIM)
    k[1, :, 0, 0], v[1, :, 0] = -1000.0, torch.nan
    q = torch.zeros(rows, 1, DIM)
    q[..., 0] = 1.0
    still = angles(128, DIM)
    still.cos.fill_(1.0), still.sin.fill_(0.0)
    for bounds in ([16] * rows, [16 - n % 2 for n in range(rows)]):
        work = one_item([1], [0], [(40, bound) for bound in bounds])
        state = partial_attention(q, k, v, work, still, ScoreRule(1.0), implementation="native")
        assert state.out.isnan().all()
