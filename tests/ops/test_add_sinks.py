"""A sink is one more key of value 0 per row and head, read once."""

import pytest
import torch
from torch import Tensor

from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.merge_states import merge_states
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HEADS, HEAD_DIM, KEYS = 5, 3, 80, 11
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
SINKS = torch.tensor([3.0, -2.0, 40.0], device=DEVICE)


def drawn(*size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(DEVICE)


def attended(scores: Tensor, v: Tensor) -> AttnState:
    """The state of scores ``[rows, heads, keys]`` over values ``[keys, heads, head_dim]``."""
    out = torch.einsum("rhn,nhd->rhd", scores.softmax(-1), v)
    return AttnState(out, scores.logsumexp(-1))


def with_sink_key(scores: Tensor, v: Tensor, sinks: Tensor) -> AttnState:
    """Attention over the keys and one more, whose score is the sink and whose value is 0."""
    column = sinks.to(scores.dtype)[:, None].expand(len(scores), -1, -1)
    return attended(torch.cat([scores, column], -1), torch.cat([v, v.new_zeros(1, *v.shape[1:])]))


@BOTH
@DTYPES
def test_a_row_with_a_sink_reads_one_more_key_of_value_0(
    implementation: str, dtype: torch.dtype
) -> None:
    scores, v = 4 * drawn(ROWS, HEADS, KEYS, seed=0), drawn(KEYS, HEADS, HEAD_DIM, seed=1)
    truth = with_sink_key(scores, v, SINKS)
    out, lse = attended(scores, v)
    state = AttnState(out.to(dtype), lse.float())
    actual = add_sinks(state, SINKS, implementation)  # type: ignore[arg-type]
    assert actual.out is state.out and actual.lse is state.lse
    plain = with_sink_key(scores.float(), v.float(), SINKS)
    assert_state_within_budget(actual, truth, AttnState(plain.out.to(dtype), plain.lse), dtype)


@BOTH
def test_it_is_the_merge_with_the_state_of_the_sink(implementation: str) -> None:
    """One of many states of a row, whatever their order."""
    scores, v = 4 * drawn(ROWS, HEADS, KEYS, seed=2), drawn(KEYS, HEADS, HEAD_DIM, seed=3)
    state = AttnState(*(x.float() for x in attended(scores, v)))
    sink_state = AttnState(torch.zeros_like(state.out), SINKS.expand(ROWS, -1))
    pairs = [torch.stack(both, 1).flatten(0, 1) for both in zip(sink_state, state, strict=True)]
    indptr = torch.arange(0, 2 * ROWS + 1, 2, dtype=torch.int32, device=DEVICE)
    merged = merge_states(AttnState(*pairs), indptr, implementation="reference")
    actual = add_sinks(state, SINKS, implementation)  # type: ignore[arg-type]
    torch.testing.assert_close(actual.out, merged.out)
    torch.testing.assert_close(actual.lse, merged.lse)


@BOTH
def test_a_row_without_keys_has_the_state_of_its_sink(implementation: str) -> None:
    out = torch.full((ROWS, HEADS, HEAD_DIM), torch.nan, device=DEVICE)
    lse = torch.full((ROWS, HEADS), -torch.inf, device=DEVICE)
    actual = add_sinks(AttnState(out, lse), SINKS, implementation)  # type: ignore[arg-type]
    assert not actual.out.any()
    assert torch.equal(actual.lse, SINKS.expand(ROWS, -1))


@BOTH
def test_nan_stays_nan_in_its_row_and_head(implementation: str) -> None:
    out = torch.ones(2, HEADS, HEAD_DIM, device=DEVICE)
    lse = torch.zeros(2, HEADS, device=DEVICE)
    lse[1, 2] = torch.nan
    actual = add_sinks(AttnState(out, lse), SINKS, implementation)  # type: ignore[arg-type]
    assert actual.out[1, 2].isnan().all() and actual.lse[1, 2].isnan()
    assert int(actual.out.isnan().sum()) == HEAD_DIM


@BOTH
def test_rows_and_heads_may_be_strided(implementation: str) -> None:
    wide = torch.randn(ROWS, 2 * HEADS, HEAD_DIM, device=DEVICE)
    lse = torch.randn(ROWS, 2 * HEADS, device=DEVICE)
    dense = AttnState(wide[:, HEADS:].clone(), lse[:, HEADS:].clone())
    rest = wide[:, :HEADS].clone()
    add_sinks(AttnState(wide[:, HEADS:], lse[:, HEADS:]), SINKS, implementation)  # type: ignore[arg-type]
    torch.testing.assert_close(wide[:, HEADS:], add_sinks(dense, SINKS, "reference").out)
    assert torch.equal(wide[:, :HEADS], rest)
