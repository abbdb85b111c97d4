"""Pages of any strides and sizes give the same attention, or are refused by name.

Caches come with slots before heads, with K and V in one tensor, with pages of many slots.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.partial_attention.native import NativePlan, Phase
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.types import ScoreRule
from tests.ops.small_lists import angles, int32, one_item, one_span

PAGES, HEADS, DIM = 5, 2, 32
RULE, TURN = ScoreRule(DIM**-0.5), angles(512, DIM)
Layout = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def slots_before_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return k, v


def stacked(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([k, v], 1)
    return both[:, 0], both[:, 1]


def heads_before_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    return k, v


def some_of_a_pool(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = heads_before_pages(torch.cat([k, k]), torch.cat([v, v]))
    return k[:PAGES], v[:PAGES]


LAYOUTS = pytest.mark.parametrize(
    "layout", [slots_before_heads, stacked, heads_before_pages, some_of_a_pool]
)


def pages_of(heads: int = HEADS, page_size: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    k, v = torch.randn(2, PAGES, heads, page_size, DIM)
    return k, v


@LAYOUTS
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("implementation", ["cpu", "native", "triton", "auto"])
def test_decode_reads_pages_of_any_layout(
    implementation: Implementation, heads: int, layout: Layout
) -> None:
    k, v = pages_of(heads)
    q = torch.randn(2, 4, DIM)
    work = one_item([3, 1], [0, 16], [(40, 27), (41, 32)])
    expected = partial_attention(q, k, v, work, TURN, RULE, implementation="reference")
    state = partial_attention(q, *layout(k, v), work, TURN, RULE, implementation=implementation)
    torch.testing.assert_close(state.out, expected.out)
    torch.testing.assert_close(state.lse, expected.lse)


@LAYOUTS
@pytest.mark.parametrize("implementation", ["cpu", "native"])
def test_explicit_positions_are_those_of_the_pages(
    implementation: Implementation, layout: Layout
) -> None:
    k, v = pages_of()
    places = torch.arange(PAGES * 16, dtype=torch.int32).flip(0).view(PAGES, 16)
    q = torch.randn(1, 4, DIM)
    work = one_item([3, 1], [0, 0], [(70, 60)], explicit=True)
    expected = partial_attention(q, k, v, work, TURN, RULE, places, "reference")
    state = partial_attention(q, *layout(k, v), work, TURN, RULE, places, implementation)
    torch.testing.assert_close(state.out, expected.out)


@LAYOUTS
@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_prefill_reads_pages_of_any_layout(implementation: Implementation, layout: Layout) -> None:
    k, v = pages_of()
    q = torch.randn(4, 4, DIM)
    spans = one_span([[22, 23, 24, 25]], [4, 2], 26)
    expected = prefill_attention(q, k, v, spans, TURN, RULE, implementation="reference")
    state = prefill_attention(q, *layout(k, v), spans, TURN, RULE, implementation=implementation)
    torch.testing.assert_close(state.out, expected.out)
    torch.testing.assert_close(state.lse, expected.lse)


def test_c_stores_to_slots_that_stand_before_heads() -> None:
    k, v = slots_before_heads(*pages_of())
    new = torch.randn(2, 1, HEADS, DIM)
    plan = NativePlan(TURN, RULE, 4, k)
    plan.point_rows(torch.tensor([2 * 16 + 5]), torch.tensor([0]))
    plan.run(Phase.STORE, kv=(new[0], new[1]), pages=plan.find_pages(k, v))
    assert torch.equal(k[2, :, 5], new[0, 0])
    assert torch.equal(v[2, :, 5], new[1, 0])


def test_c_refuses_keys_whose_numbers_have_gaps() -> None:
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in pages_of())
    work = one_item([1], [0], [(20, 12)])
    with pytest.raises(InvalidOption, match="last strides"):
        partial_attention(torch.randn(1, 4, DIM), k, v, work, TURN, RULE, implementation="native")


@pytest.mark.parametrize("page_size", [1, 65, 200])
@pytest.mark.parametrize("rows", [1, 9])
def test_c_reads_pages_of_any_size(page_size: int, rows: int) -> None:
    k, v = pages_of(page_size=page_size)
    q = torch.randn(rows, 4, DIM)
    bound = 2 * page_size - page_size // 3
    work = one_item([3, 1], [0, page_size], [(450 + n, bound - n // 2) for n in range(rows)])
    expected = partial_attention(q, k, v, work, TURN, RULE, implementation="reference")
    state = partial_attention(q, k, v, work, TURN, RULE, implementation="native")
    torch.testing.assert_close(state.out, expected.out, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(state.lse, expected.lse)


@pytest.mark.parametrize("implementation", ["cpu", "native", "triton"])
def test_a_key_before_the_frame_is_no_key(implementation: Implementation) -> None:
    k, v = pages_of()
    q = torch.randn(1, 4, DIM)
    work = one_item([1], [-4], [(5, 12)])
    expected = partial_attention(q, k, v, work, TURN, RULE, implementation="reference")
    state = partial_attention(q, k, v, work, TURN, RULE, implementation=implementation)
    torch.testing.assert_close(state.out, expected.out)


@pytest.mark.parametrize("implementation", ["reference", "triton", "cpu"])
@pytest.mark.parametrize("tiles", [[[8, 9, 10], [5, 6, 7]], [[5, 5, 7]], [[7, 7, 8]]])
def test_rows_in_any_order_see_what_stands_before_them(
    tiles: list[list[int]], implementation: Implementation
) -> None:
    k, v = pages_of()
    rows = [position for tile in tiles for position in tile]
    q = torch.randn(len(rows), 4, DIM)
    spans = one_span(tiles, [2], max(rows) + 1)
    together = prefill_attention(q, k, v, spans, TURN, RULE, implementation=implementation)
    for n, position in enumerate(rows):
        alone = prefill_attention(
            q[n : n + 1], k, v, one_span([[position]], [2], max(rows) + 1), TURN, RULE,
            implementation="reference",
        )  # fmt: skip
        torch.testing.assert_close(together.out[n], alone.out[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_no_tiles_leave_rows_without_keys(implementation: Implementation) -> None:
    k, v = slots_before_heads(*pages_of())
    spans = one_span([], [], 0)
    state = prefill_attention(
        torch.randn(0, 4, DIM), k, v, spans, TURN, RULE, implementation=implementation
    )
    assert state.out.shape == (0, 4, DIM)
    assert state.lse.shape == (0, 4)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_span_longer_than_its_pages_is_refused(implementation: Implementation) -> None:
    spans = one_span([[50]], [2], 40)
    with pytest.raises(InvalidOption, match="40 keys"):
        prefill_attention(
            torch.randn(1, 4, DIM), *pages_of(), spans, TURN, RULE, implementation=implementation
        )


@pytest.mark.parametrize("implementation", ["reference", "cpu", "native"])
def test_attention_of_what_does_not_fit_together_is_refused(implementation: Implementation) -> None:
    k, v = pages_of()
    work = one_item([1], [0], [(20, 12)])

    def attend(q: Tensor, k: Tensor = k, v: Tensor = v, rule: ScoreRule = RULE) -> None:
        partial_attention(q, k, v, work, TURN, rule, implementation=implementation)

    with pytest.raises(InvalidOption, match="5 query heads can't be shared out among 2"):
        attend(torch.randn(1, 5, DIM))
    with pytest.raises(InvalidOption, match="1 query heads can't"):
        attend(torch.randn(1, 1, DIM))
    with pytest.raises(InvalidOption, match="make them alike"):
        attend(torch.randn(1, 4, DIM), v=v.bfloat16())
    with pytest.raises(InvalidOption, match="alibi_slopes are"):
        attend(torch.randn(1, 4, DIM), rule=ScoreRule(0.1, alibi_slopes=torch.ones(3)))


def test_fp64_is_the_reference_s() -> None:
    k, v = (x.double() for x in pages_of())
    q = torch.randn(1, 4, DIM, dtype=torch.float64)
    work = one_item([1], [0], [(20, 12)])
    for name in ("auto", "cpu"):
        state = partial_attention(q, k, v, work, TURN, RULE, implementation=name)
        assert state.out.dtype is torch.float64
        spans = one_span([[11]], [1], 12)
        state = prefill_attention(q, k, v, spans, TURN, RULE, implementation=name)
        assert state.lse.dtype is torch.float64


def test_items_of_one_head_are_read_in_c() -> None:
    k, v = pages_of()
    q = torch.randn(1, 4, DIM)
    work = one_item([1], [0], [(20, 12)], kv_head=1)
    with pytest.raises(InvalidOption, match="use implementation='native'"):
        partial_attention(q, k, v, work, TURN, RULE)
    state = partial_attention(q, k, v, work, TURN, RULE, implementation="native")
    expected = partial_attention(q, k, v, work, TURN, RULE, implementation="reference")
    torch.testing.assert_close(state.out[:, 2:], expected.out[:, 2:])
    assert (state.lse[:, :2] == -torch.inf).all()


def test_positions_of_an_explicit_item_must_be_given() -> None:
    work = one_item([1], [0], [(20, 12)], explicit=True)
    for name in ("reference", "cpu", "native"):
        with pytest.raises(InvalidOption, match="needs slot_positions"):
            partial_attention(
                torch.randn(1, 4, DIM), *pages_of(), work, TURN, RULE, implementation=name
            )


def test_pages_that_were_seen_are_the_reference_s() -> None:
    k, v = pages_of()
    q = torch.randn(1, 4, DIM)
    work = replace(one_item([1, 2], [0, 16], [(40, 32)]), page_seen=int32(1, 0))
    state = partial_attention(q, k, v, work, TURN, RULE)
    expected = partial_attention(q, k, v, work, TURN, RULE, implementation="reference")
    assert torch.equal(state.out, expected.out)
    with pytest.raises(InvalidOption, match="page_seen"):
        partial_attention(q, k, v, work, TURN, RULE, implementation="native")
