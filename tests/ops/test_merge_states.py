"""Laws of ⊕: attention over the union; it commutes, associates, and has a unit."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import KeptStates, kernel, merge_states
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.poison import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM = 3, 80
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])


def merged(
    states: AttnState, indptr: list[int], implementation: str, carried: AttnState | None = None
) -> AttnState:
    at = torch.tensor(indptr, dtype=torch.int32, device=DEVICE)
    with poisoned():
        return merge_states(states, at, carried, implementation=implementation)  # type: ignore[arg-type]


def softmax_state(scores: Tensor, v: Tensor) -> AttnState:
    """Attention of one row with scores ``[heads, keys]`` over ``[keys, heads, head_dim]``."""
    if not scores.shape[1]:
        return empty_state()
    out = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return AttnState(out, scores.logsumexp(-1))


def empty_state(out: float = 0.0) -> AttnState:
    return AttnState(
        torch.full((HEADS, HEAD_DIM), out, device=DEVICE, dtype=torch.float64),
        torch.full((HEADS,), -torch.inf, device=DEVICE, dtype=torch.float64),
    )


def stacked(states: list[AttnState], dtype: torch.dtype = torch.float32) -> AttnState:
    out, lse = torch.stack([s.out for s in states]), torch.stack([s.lse for s in states])
    return AttnState(out.to(dtype), lse.to(dtype))


def random_parts(sizes: list[int], seed: int = 0) -> tuple[list[AttnState], AttnState]:
    """The states of disjoint key sets of these sizes, and that of their union, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    scores = 8 * torch.randn(HEADS, total, generator=generator, dtype=torch.float64).to(DEVICE)
    v = torch.randn(total, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64).to(DEVICE)
    parts = zip(scores.split(sizes, 1), v.split(sizes), strict=True)
    return [softmax_state(s, x) for s, x in parts], softmax_state(scores, v)


def assert_merges_to(actual: AttnState, row: int, whole: AttnState, parts: list[AttnState]) -> None:
    """The row equals the whole, as closely as the plain formula over fp32 states does."""
    weight = torch.stack([p.lse for p in parts]).float().softmax(0).nan_to_num()
    out = (weight[..., None] * torch.stack([p.out for p in parts]).float()).sum(0)
    plain = AttnState(out, torch.stack([p.lse for p in parts]).float().logsumexp(0))
    mine = AttnState(actual.out[row], actual.lse[row])
    assert_state_within_budget(mine, whole, plain, torch.float32)


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@BOTH
@settings(max_examples=15)
@given(sizes=SIZES, seed=st.integers(0, 2**16))
def test_a_merge_is_attention_over_the_union(
    implementation: str, sizes: list[int], seed: int
) -> None:
    parts, whole = random_parts(sizes, seed)
    assert_merges_to(merged(stacked(parts), [0, len(parts)], implementation), 0, whole, parts)


@given(sizes=SIZES, seed=st.integers(0, 2**16), order=st.randoms(use_true_random=False))
def test_order_and_grouping_do_not_matter(sizes: list[int], seed: int, order: object) -> None:
    parts, whole = random_parts(sizes, seed)
    order.shuffle(parts)  # type: ignore[attr-defined]
    cut = len(parts) // 2
    halves = merged(stacked(parts, torch.float64), [0, cut, len(parts)], "reference")
    torch.testing.assert_close(merged(halves, [0, 2], "reference").out[0], whole.out)
    torch.testing.assert_close(merged(halves, [0, 2], "reference").lse[0], whole.lse)


@BOTH
def test_rows_take_as_many_states_as_the_list_says(implementation: str) -> None:
    sizes = [[4], [], [1, 2, 3], [5] * 40]
    rows = [random_parts(s, seed) if s else ([], empty_state()) for seed, s in enumerate(sizes)]
    states = stacked([state for parts, _ in rows for state in parts])
    out = merged(states, [0, 1, 1, 4, 44], implementation)
    for row, (parts, whole) in enumerate(rows):
        assert_merges_to(out, row, whole, parts or [empty_state()])


@BOTH
def test_the_empty_state_is_the_unit_whatever_its_output_holds(implementation: str) -> None:
    parts, whole = random_parts([6])
    nothing = empty_state(torch.nan)
    for around in ([nothing, *parts], [*parts, nothing], [nothing, *parts, nothing]):
        out = merged(stacked(around), [0, len(around)], implementation)
        assert_merges_to(out, 0, whole, parts)


@BOTH
def test_only_empty_states_stay_empty(implementation: str) -> None:
    states = stacked([empty_state(torch.nan)] * 3)
    out = merged(states, [0, 3, 3], implementation)
    assert torch.equal(out.lse, torch.full((2, HEADS), -torch.inf, device=DEVICE))
    assert not out.out.any()


@BOTH
def test_the_log_is_natural(implementation: str) -> None:
    states = AttnState(
        torch.zeros(2, HEADS, HEAD_DIM, device=DEVICE), torch.zeros(2, HEADS, device=DEVICE)
    )
    states.out[1] = 1.0
    states.lse[1] = math.log(3.0)
    out = merged(states, [0, 2], implementation)
    torch.testing.assert_close(out.lse, torch.full_like(out.lse, math.log(4.0)))
    torch.testing.assert_close(out.out, torch.full_like(out.out, 0.75))


@BOTH
def test_a_carried_state_is_one_more_state(implementation: str) -> None:
    parts, whole = random_parts([3, 0, 5, 2])
    carried = stacked([parts[0], empty_state(torch.nan), parts[1]])
    states = stacked(parts[1:] + parts)
    out = merged(states, [0, 3, 7, 7], implementation, carried)
    assert_merges_to(out, 0, whole, parts)
    assert_merges_to(out, 1, whole, parts)
    assert_merges_to(out, 2, empty_state(), [empty_state()])


@BOTH
def test_capacity_past_the_last_state_is_never_read(implementation: str) -> None:
    parts, whole = random_parts([3, 4])
    beyond = AttnState(empty_state(torch.nan).out, torch.full_like(parts[0].lse, torch.nan))
    out = merged(stacked([*parts, beyond, beyond]), [0, 2, 2], implementation)
    assert_merges_to(out, 0, whole, parts)
    assert not out.out.isnan().any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_given_output_is_written_in_its_dtype(implementation: str, dtype: torch.dtype) -> None:
    parts, whole = random_parts([3, 4, 2])
    fused = torch.full((1, 2 * HEADS, HEAD_DIM), torch.nan, dtype=dtype, device=DEVICE)
    at = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    given_out = fused[:, ::2]
    out = merge_states(stacked(parts), at, out=given_out, implementation=implementation)  # type: ignore[arg-type]
    assert out.out is given_out
    assert fused[:, 1::2].isnan().all()
    torch.testing.assert_close(given_out[0], whole.out.to(dtype))


@BOTH
def test_what_a_row_keeps_is_the_merge_of_its_last_states_and_goes_into_its_answer(
    implementation: Implementation,
) -> None:
    generator = torch.Generator().manual_seed(5)
    states = AttnState(
        torch.randn(9, 3, 16, generator=generator), torch.randn(9, 3, generator=generator)
    )
    out = torch.randn(4, 3, 16, generator=generator)
    before = AttnState(out, torch.randn(4, 3, generator=generator))
    kept = KeptStates(
        before.out.clone(), before.lse.clone(),
        at=torch.tensor([2, -1, 0], dtype=torch.int32),
        first=torch.tensor([1, 0, 6], dtype=torch.int32),
        fresh=torch.tensor([0, 0, 1], dtype=torch.int32),
    )  # fmt: skip
    indptr = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    mine = merge_states(states, indptr, kept=kept, implementation=implementation)

    def of(numbers: list[int], *more: int) -> AttnState:
        outs = torch.cat([states.out[numbers], before.out[list(more)]])
        lses = torch.cat([states.lse[numbers], before.lse[list(more)]])
        everything = torch.tensor([0, len(outs)], dtype=torch.int32)
        return merge_states(AttnState(outs, lses), everything, implementation="reference")

    for row, merged in enumerate((of([0, 1, 2], 2), of([3, 4]), of([5, 6, 7, 8]))):
        assert torch.allclose(mine.out[row], merged.out[0], atol=1e-6)
        assert torch.allclose(mine.lse[row], merged.lse[0], atol=1e-6)
    for place, own in ((2, of([1, 2], 2)), (0, of([6, 7, 8]))):
        assert torch.allclose(kept.out[place], own.out[0], atol=1e-6)
        assert torch.allclose(kept.lse[place], own.lse[0], atol=1e-6)
    for place in (1, 3):
        assert torch.equal(kept.out[place], before.out[place])


@pytest.mark.parametrize("few_states", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_several_heads_a_program_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, few_states: bool
) -> None:
    """Rows of no, one, several and many states, and of states that are empty and hold anything;
    those that are read at once may have other bits on a device."""
    out, lse = torch.randn(16, 8, 80, device=DEVICE), torch.randn(16, 8, device=DEVICE)
    for state, head in ((3, 5), (4, 2), (5, 2)):
        out[state, head], lse[state, head] = torch.nan, -torch.inf
    indptr = torch.tensor([0, 0, 3, 4, 6, 15], dtype=torch.int32, device=DEVICE)
    found = []
    for many in (1, 10**6):
        monkeypatch.setattr(kernel, "_MANY", many)
        into = torch.full((5, 8, 80), torch.nan, dtype=dtype, device=DEVICE)
        with poisoned():
            states = AttnState(out, lse)
            found.append(
                merge_states(
                    states, indptr, out=into, implementation="triton", few_states=few_states
                )
            )
    same = torch.equal if not few_states else partial(torch.allclose, atol=1e-3, rtol=1e-3)
    assert same(found[0].out, found[1].out)
    assert same(found[0].lse, found[1].lse)
    assert not found[0].out[2, 5].any()
    assert not found[0].out[3, 2].any()
    assert not found[0].out[0].any()


def test_how_many_states_other_rows_have_changes_no_bit() -> None:
    counts = [3, 0, 1, 3, 2, 0, 5]
    at = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    states = stacked(random_parts([2] * sum(counts))[0])
    together = merge_states(states, at, implementation="reference")
    for row in range(len(counts)):
        alone = merge_states(states, at[row : row + 2], implementation="reference")
        assert torch.equal(together.out[row], alone.out[0])
        assert torch.equal(together.lse[row], alone.lse[0])


def test_what_a_row_starts_from_is_one_state_a_row() -> None:
    states, at = stacked([empty_state()] * 2), torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(InvalidOption, match="2 rows carry 1 states"):
        merge_states(states, at, AttnState(states.out[:1], states.lse[:1]))
    numbers = torch.zeros(2, dtype=torch.int32)
    kept = KeptStates(states.out.clone(), states.lse.clone(), numbers - 1, numbers, numbers)
    with pytest.raises(InvalidOption, match="starts from one state"):
        merge_states(states, at, states, kept=kept)
